"""Parameters that chat and text completions share: checked, and written into messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

from ...proto import tandem_pb2 as pb
from ...shared.text.reasoning import NO_PARSER
from ...shared.text.stop import StopStrings
from ..errors import invalid
from ..generation import TextOptions
from ..options import RouterOptions
from ..served_model import ServedModel
from .body_fields import Fields, check_integer, wrong_type

MAX_LOGPROBS = 20
MAX_STOPS = 64
MAX_STOP_LENGTH = 1024
MAX_STOP_IDS = 256
MAX_ALLOWED_IDS = 1024
MAX_BIAS = 1024
INT32, INT64 = 2**31, 2**63

# Accepted without effect: OpenAI uses them for its own accounting.
IGNORED = frozenset(
    ("user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")
)
COMMON_FIELDS = IGNORED | {
    "model",
    "stream",
    "stream_options",
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "logit_bias",
    "allowed_token_ids",
    "max_tokens",
    "min_tokens",
    "ignore_eos",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "logprobs",
    "prompt_logprobs",
    "priority",
    "cache_salt",
    "add_special_tokens",
    "return_token_ids",
}
# Known parameters that are not implemented, with the values that have no effect.
COMMON_UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "truncate_prompt_tokens": (),
    "bad_words": ([],),
    "logits_processors": ([],),
    "spaces_between_special_tokens": (True,),
    "return_tokens_as_token_ids": (False,),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
    "kv_transfer_params": (),
    "vllm_xargs": ({},),
    "best_of": (1,),
    "logprob_token_ids": (),
    "thinking_token_budget": (-1,),
    "repetition_detection": (),
    "ec_transfer_params": (),
    "watermarking": (False,),
    "response_format": ({"type": "text"},),
}


class SharedFields(TypedDict):
    """The fields of a ``GenerationRequest`` that both surfaces read in the same way."""

    model: ServedModel
    sampling: pb.Sampling
    stream: bool
    include_usage: bool
    prompt_logprobs: int | None
    return_token_ids: bool
    priority: int
    cache_salt: str


def read_shared(fields: Fields, model: ServedModel, options: RouterOptions) -> SharedFields:
    """Read the fields that can be checked before a text is encoded."""
    model.check_name(fields.string("model", "", 1024))
    stream, include_usage = _stream(fields)
    return SharedFields(
        model=model,
        sampling=_sampling(fields, model, options),
        stream=stream,
        include_usage=include_usage,
        prompt_logprobs=_prompt_logprobs(fields, stream),
        return_token_ids=fields.boolean("return_token_ids"),
        priority=fields.integer("priority", 0, -INT32, INT32 - 1),
        cache_salt=fields.string("cache_salt", "", 256),
    )


def _sampling(fields: Fields, model: ServedModel, options: RouterOptions) -> pb.Sampling:
    """The sampling parameters, without ``max_tokens`` and logprobs."""
    defaults = model.defaults
    sampling = pb.Sampling(
        temperature=fields.number("temperature", defaults.get("temperature", 1.0), 0, 2),
        top_p=fields.number("top_p", defaults.get("top_p", 1.0), 0, 1),
        top_k=max(0, fields.integer("top_k", int(defaults.get("top_k", 0)), -1, INT32 - 1)),
        min_p=fields.number("min_p", defaults.get("min_p", 0.0), 0, 1),
        repetition_penalty=fields.number(
            "repetition_penalty", defaults.get("repetition_penalty", 1.0), 0, 100
        ),
        presence_penalty=fields.number("presence_penalty", 0.0, -2, 2),
        frequency_penalty=fields.number("frequency_penalty", 0.0, -2, 2),
        seed=fields.optional_integer("seed", -INT64, INT64 - 1),
        logit_bias=_logit_bias(fields, model.vocab_size),
        ignore_eos=fields.boolean("ignore_eos"),
        allowed_token_ids=_token_ids(
            fields, "allowed_token_ids", MAX_ALLOWED_IDS, model.vocab_size
        ),
        stop_token_ids=_token_ids(fields, "stop_token_ids", MAX_STOP_IDS, model.vocab_size),
        n=fields.integer("n", 1, 1, options.max_n),
    )
    for name in ("top_p", "repetition_penalty"):
        if getattr(sampling, name) <= 0:
            raise invalid(f"Invalid value for '{name}': must be above 0.", name)
    return sampling


def read_text_options(
    fields: Fields,
    *,
    echo: bool = False,
    discard_output: bool = False,
    reasoning_parser: str = NO_PARSER,
) -> TextOptions:
    """Read the options of how the router turns tokens into text."""
    return TextOptions(
        stop=_stops(fields),
        include_stop=fields.boolean("include_stop_str_in_output"),
        skip_special_tokens=fields.boolean("skip_special_tokens", True),
        min_tokens=fields.integer("min_tokens", 0, 0, INT32 - 1),
        echo=echo,
        reasoning_parser=reasoning_parser,
        discard_output=discard_output,
    )


def _stream(fields: Fields) -> tuple[bool, bool]:
    """(stream, include_usage)."""
    stream = fields.boolean("stream")
    if "stream_options" not in fields:
        return stream, False
    options = fields.inner(fields.mapping("stream_options", 16), "stream_options")
    if not stream and fields.raw("stream_options"):
        raise invalid(
            "The 'stream_options' parameter is only allowed when 'stream' is enabled.",
            "stream_options",
        )
    # Obfuscation pads chunks against traffic analysis; it is accepted without effect.
    options.check_names(
        frozenset(("include_usage", "include_obfuscation")), {"continuous_usage_stats": (False,)}
    )
    return stream, options.boolean("include_usage")


def _prompt_logprobs(fields: Fields, stream: bool) -> int | None:
    value = fields.optional_integer("prompt_logprobs", 0, MAX_LOGPROBS)
    if value is not None and stream:
        raise invalid("'prompt_logprobs' is not available with 'stream'.", "prompt_logprobs")
    return value


def check_context(
    prompts: Sequence[int], wanted: int | None, model: ServedModel, *, param: str, default: int
) -> list[int]:
    """``max_tokens`` of each prompt: ``wanted``, or up to ``default`` within the context."""
    limit = model.max_model_len
    granted = []
    for length in prompts:
        requested = 1 if wanted is None else wanted
        if length + requested > limit:
            raise too_long(length, requested, model, param=param)
        granted.append(min(default, limit - length) if wanted is None else wanted)
    return granted


def too_long(length: int, requested: int, model: ServedModel, *, param: str) -> Exception:
    """The error for a prompt of ``length`` tokens with ``requested`` more to generate."""
    return invalid(
        f"This model's maximum context length is {model.max_model_len} tokens. However, you "
        f"requested {length + requested} tokens ({length} in the {param}, {requested} in the "
        f"completion). "
        f"Please reduce the length of the {param} or completion.",
        param,
        "context_length_exceeded",
    )


def check_length(characters: int, model: ServedModel, *, param: str) -> None:
    """Reject a text that cannot fit, before encoding it."""
    fewest = model.tokenizer.fewest_tokens(characters)
    if fewest >= model.max_model_len:
        raise invalid(
            f"This model's maximum context length is {model.max_model_len} tokens. However, there "
            f"are {characters} characters in your {param}, which are at least {fewest} tokens. "
            f"Please reduce the length of the {param}.",
            param,
            "context_length_exceeded",
        )


def check_min_tokens(minimum: int, granted: Sequence[int]) -> None:
    if minimum > min(granted):
        raise invalid(
            f"'min_tokens' ({minimum}) must not exceed the tokens that may be generated "
            f"({min(granted)}).",
            "min_tokens",
        )


def _stops(fields: Fields) -> StopStrings:
    value = fields.raw("stop")
    if value is None:
        return StopStrings()
    stops = [value] if isinstance(value, str) else fields.array("stop", MAX_STOPS)
    for stop in stops:
        if not isinstance(stop, str):
            raise wrong_type("stop", "a string or an array of strings", stop)
        if not 0 < len(stop) <= MAX_STOP_LENGTH:
            raise invalid(
                f"Invalid 'stop': each string must have 1 to {MAX_STOP_LENGTH} characters, "
                f"not {len(stop)}.",
                "stop",
            )
    return StopStrings(stops)


def _token_ids(fields: Fields, name: str, most: int, vocab_size: int) -> list[int]:
    ids = fields.array(name, most)
    for i, token in enumerate(ids):
        check_integer(f"{name}[{i}]", token, 0, vocab_size - 1)
    return ids


def _logit_bias(fields: Fields, vocab_size: int) -> dict[int, float]:
    bias = {}
    entries = Fields(fields.mapping("logit_bias", MAX_BIAS))
    for name in fields.mapping("logit_bias", MAX_BIAS):
        if not (name.isascii() and name.isdigit() and len(name) <= 10) or int(name) >= vocab_size:
            raise invalid(
                f"Invalid key in 'logit_bias': '{name[:64]}'; keys are token ids from 0 to "
                f"{vocab_size - 1}.",
                "logit_bias",
            )
        bias[int(name)] = entries.number(name, 0.0, -100, 100)
    return bias
