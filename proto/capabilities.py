"""Capabilities: the parts of requests that older nodes do not know.

protobuf drops unknown fields without an error, so an older node would serve a request with a new
field as if it lacked it. Nodes therefore announce the names of what they support: to routers when
they join, to each other when they greet. ``FIELDS`` says what each field needs; a request is sent
only to nodes that have all of it. A node that announces nothing is of a version before
capabilities, and has the base set.
"""

from __future__ import annotations

from collections.abc import Iterator, Set

from google.protobuf.message import Message

ALLOWED_TOKEN_IDS = "allowed_token_ids"
STRUCTURED_OUTPUTS = "structured_outputs"
EMBEDDINGS = "embeddings"
BAD_WORDS = "bad_words"
LOGPROB_TOKEN_IDS = "logprob_token_ids"
THINKING_BUDGET = "thinking_budget"
TOOL_CALLS = "tool_calls"
RESUME = "resume"
THINKING_ENDS_IN_CALLS = "thinking_ends_in_calls"
SCORES = "scores"
# ``Decode.Stream``. No request needs it: others are called with ``Decode.Generate``.
STREAM = "stream"

CAPABILITIES = frozenset(
    {
        ALLOWED_TOKEN_IDS,
        STRUCTURED_OUTPUTS,
        EMBEDDINGS,
        BAD_WORDS,
        LOGPROB_TOKEN_IDS,
        THINKING_BUDGET,
        TOOL_CALLS,
        RESUME,
        THINKING_ENDS_IN_CALLS,
        SCORES,
        STREAM,
    }
)
# Bits of introductions, from 4 on; a capability needs one only if a field of ``OpenRequest`` needs
# the capability.
BITS: dict[str, int] = {}
# Set by all nodes of protocol version 2, of which earlier builds expect them: KV outside a layer's
# window is not sent, and the ports of an open data plane require the epoch as a password.
OF_PROTOCOL_2 = 1 | 2
# Needed by the fields that every version knows.
BASE = ""


def _base(names: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), BASE)


# The capability that each field needs if it is set, by message. ``deaths``,
# ``split_prompt_logprobs`` and ``packed_logprobs`` change no result where they are ignored.
FIELDS: dict[str, dict[str, str]] = {
    "GenerateRequest": _base(
        "request_id prompt sampling priority cache_salt prefill deadline_seconds call_id "
        "split_prompt_logprobs packed_logprobs deaths"
    )
    | {"embed": EMBEDDINGS, "resume": RESUME},
    "Resumed": _base("index tokens"),
    "Embed": _base("pooling normalize dimensions") | {"score": SCORES, "second_text": SCORES},
    "Sampling": _base(
        "temperature top_k top_p min_p repetition_penalty presence_penalty frequency_penalty seed "
        "logit_bias max_tokens min_tokens ignore_eos stop_token_ids logprobs prompt_logprobs n"
    )
    | {
        "allowed_token_ids": ALLOWED_TOKEN_IDS,
        "bad_words": BAD_WORDS,
        "logprob_token_ids": LOGPROB_TOKEN_IDS,
        "structured_outputs": STRUCTURED_OUTPUTS,
        "thinking": THINKING_BUDGET,
    },
    "TokenIds": _base("ids"),
    "ThinkingBudget": _base("tokens start end param") | {"calls": THINKING_ENDS_IN_CALLS},
    "StructuredOutputs": _base(
        "json regex choice grammar json_object structural_tag compact reasoning_start "
        "reasoning_end param"
    )
    | {"tool_calls": TOOL_CALLS},
    "ChoiceList": _base("texts"),
    "PrefillCandidate": _base(
        "node_id epoch address queued_prefill_tokens prefill_tokens_per_second"
    ),
    "OpenRequest": _base(
        "transfer_id attempt node_id epoch peer_epoch prompt first_token end_token priority "
        "cache_salt deadline_seconds window_bytes private ranks kv_dtype resume_at"
    ),
}

_OF_TRANSFERS = frozenset(FIELDS["OpenRequest"].values())


def needed(request: Message) -> frozenset[str]:
    """The capabilities that a ``GenerateRequest`` or an ``OpenRequest`` needs of its receiver."""
    return frozenset(_needed(request)) - {BASE}


def has(capabilities: Set[str], needs: Set[str], *, prefill: bool) -> bool:
    """True if a node with these capabilities may serve a ``GenerateRequest`` with these needs; a
    ``prefill`` node is concerned only by what an ``OpenRequest`` carries too."""
    if prefill and needs:
        needs = needs & _OF_TRANSFERS
    return needs <= capabilities


def to_bits(capabilities: Set[str]) -> int:
    """The bits of an introduction."""
    return OF_PROTOCOL_2 | sum(bit for name, bit in BITS.items() if name in capabilities)


def from_bits(bits: int) -> frozenset[str]:
    """The capabilities in an introduction, without those of newer versions."""
    return frozenset(name for name, bit in BITS.items() if bits & bit)


def _needed(message: Message) -> Iterator[str]:
    table = FIELDS[message.DESCRIPTOR.name]
    for field, value in message.ListFields():
        yield table[field.name]
        kind = field.message_type
        if kind is not None and not kind.GetOptions().map_entry:
            for part in (value,) if isinstance(value, Message) else value:
                yield from _needed(part)
