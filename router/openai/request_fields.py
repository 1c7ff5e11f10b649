"""Parameters that chat and text completions share: checked and converted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from pydantic import ValidationError

from ...proto import tandem_pb2 as pb
from ...shared.text.reasoning import NO_PARSER
from ...shared.text.stop import StopStrings
from ...shared.text.tool_parsers.tool_use import ToolUse
from ..errors import invalid
from ..generation import BeamOptions, GenerationRequest, TextOptions
from ..options import RouterOptions
from ..requests.body_errors import check_integer, check_token, to_request_error
from ..requests.sampling import numbers_of, sampling_message
from ..served_model import ServedModel
from .beam_fields import read_beams
from .generation_body import BIASES, GenerationBody, StreamOptions, check_alternatives
from .structured_outputs import read_constraint

# Invalid keys that an error lists.
MAX_SHOWN = 4
# The limit of the nodes.
MAX_BAD_WORD_TOKENS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAIRequest(GenerationRequest):
    """A request, and the options of its response in OpenAI's shape."""

    include_usage: bool = False
    continuous_usage: bool = False
    tokens_as_ids: bool = False  # in logprobs
    timed: bool = False  # the response has `metrics`


class SharedFields(TypedDict):
    """The fields of an ``OpenAIRequest`` that are the same for chat and text completions."""

    model: ServedModel
    sampling: pb.Sampling
    stream: bool
    include_usage: bool
    continuous_usage: bool
    best: int | None
    beams: BeamOptions | None
    prompt_logprobs: int | None
    return_token_ids: bool
    tokens_as_ids: bool
    timed: bool
    priority: int
    cache_salt: str


def read_shared(
    body: GenerationBody, ignored: set[str], model: ServedModel, options: RouterOptions
) -> SharedFields:
    """Read the fields that can be checked before any text is tokenized."""
    model.check_name(body.model)
    stream = _stream_options(body, ignored)
    best = None if body.use_beam_search else _best(body, options)
    sampling = _sampling(body, ignored, model, options)
    constrained = sampling.HasField("structured_outputs")
    check_alternatives("prompt_logprobs", body.prompt_logprobs, options)
    if body.prompt_logprobs is not None and body.stream:
        raise invalid("'prompt_logprobs' is not available with 'stream'.", "prompt_logprobs")
    # Most tokenizers never write spaces between special tokens; for them true has no effect.
    if not (body.spaces_between_special_tokens or model.tokenizer.texts.exact):
        message = "'spaces_between_special_tokens' must be true for this model's tokenizer."
        raise invalid(message, "spaces_between_special_tokens", "unsupported_value")
    return SharedFields(
        model=model,
        sampling=sampling,
        stream=body.stream,
        include_usage=stream.include_usage,
        continuous_usage=stream.include_usage and stream.continuous_usage_stats,
        best=best,
        beams=read_beams(body, model, constrained=constrained),
        prompt_logprobs=body.prompt_logprobs,
        return_token_ids=body.return_token_ids,
        tokens_as_ids=body.return_tokens_as_token_ids or options.return_tokens_as_token_ids,
        timed=options.enable_per_request_metrics,
        priority=body.priority,
        cache_salt=body.cache_salt,
    )


def _sampling(
    body: GenerationBody, ignored: set[str], model: ServedModel, options: RouterOptions
) -> pb.Sampling:
    """The sampling parameters, without ``max_tokens`` and logprobs."""
    check_integer("n", body.n, 1, options.max_n)
    _check_token_ids("allowed_token_ids", body.allowed_token_ids, model.vocab_size)
    _check_token_ids("stop_token_ids", body.stop_token_ids, model.vocab_size)
    _check_token_ids("logprob_token_ids", body.logprob_token_ids, model.vocab_size)
    return sampling_message(
        model,
        numbers_of(body),
        seed=body.seed,
        logit_bias=_logit_bias(body.logit_bias, model.vocab_size),
        ignore_eos=body.ignore_eos,
        allowed_token_ids=body.allowed_token_ids,
        bad_words=[pb.TokenIds(ids=ids) for ids in _bad_word_ids(body.bad_words, model)],
        logprob_token_ids=body.logprob_token_ids,
        stop_token_ids=body.stop_token_ids,
        n=body.n if body.use_beam_search else body.best_of or body.n,
        structured_outputs=read_constraint(body, ignored),
    )


def read_text_options(
    body: GenerationBody,
    *,
    echo: bool = False,
    discard_output: bool = False,
    reasoning_parser: str = NO_PARSER,
    tools: ToolUse | None = None,
) -> TextOptions:
    """Read the options for turning tokens into text."""
    stops = [body.stop] if isinstance(body.stop, str) else body.stop
    return TextOptions(
        stop=StopStrings(stops) if stops else StopStrings(),
        include_stop=body.include_stop_str_in_output,
        skip_special_tokens=body.skip_special_tokens,
        min_tokens=body.min_tokens,
        echo=echo,
        reasoning_parser=reasoning_parser,
        tools=tools,
        discard_output=discard_output,
    )


def _best(body: GenerationBody, options: RouterOptions) -> int | None:
    """The number of choices to return, if ``best_of`` generates more."""
    if body.best_of is None or body.best_of == body.n:
        return None
    check_integer("best_of", body.best_of, 1, options.max_n)
    if body.best_of < body.n:
        message = f"'best_of' ({body.best_of}) must be at least 'n' ({body.n})."
        raise invalid(message, "best_of")
    if body.stream:
        raise invalid("'best_of' greater than 'n' is not available with 'stream'.", "best_of")
    return body.n


def _stream_options(body: GenerationBody, ignored: set[str]) -> StreamOptions:
    if body.stream_options and not body.stream:
        raise invalid(
            "The 'stream_options' parameter is only allowed when 'stream' is enabled.",
            "stream_options",
        )
    return StreamOptions.read(body.stream_options, ignored, "stream_options.")


def listed_logprobs(logprobs: int | None, body: GenerationBody) -> int | None:
    """The number of alternatives listed for each generated token."""
    ids = len(body.logprob_token_ids)
    return ids + 1 if ids else logprobs


def check_min_tokens(minimum: int, granted: Sequence[int]) -> None:
    """Raise ``RequestError`` if a prompt's token limit is below ``minimum``."""
    if minimum > min(granted):
        raise invalid(
            f"'min_tokens' ({minimum}) must not exceed the tokens that may be generated "
            f"({min(granted)}).",
            "min_tokens",
        )


def _bad_word_ids(words: Sequence[str], model: ServedModel) -> list[list[int]]:
    """The token sequences of each word, at the beginning of a text and after a space: many
    tokenizers merge the space into the first token. Raises ``RequestError``."""
    sequences: dict[tuple[int, ...], None] = {}
    for word in words:
        if not word.strip():
            raise invalid("Invalid 'bad_words': a word consists of spaces only.", "bad_words")
        for text in (word, " " + word.lstrip()):
            ids = tuple(model.tokenizer.encode(text, add_special_tokens=False))
            if len(ids) > MAX_BAD_WORD_TOKENS:
                raise invalid(
                    f"Invalid 'bad_words': {word[:64]!r} has {len(ids)} tokens; the limit is "
                    f"{MAX_BAD_WORD_TOKENS}.",
                    "bad_words",
                )
            if ids:
                sequences[ids] = None
    return [list(ids) for ids in sequences]


def _check_token_ids(name: str, ids: Sequence[int], vocab_size: int) -> None:
    for i, token in enumerate(ids):
        check_token(f"{name}[{i}]", token, vocab_size)


def _logit_bias(biases: dict[str, Any], vocab_size: int) -> dict[int, float]:
    bad_keys = [f"'{name[:64]}'" for name in biases if not _is_token_id(name, vocab_size)]
    if bad_keys:
        keys = ", ".join(bad_keys[:MAX_SHOWN]) + (", ..." if len(bad_keys) > MAX_SHOWN else "")
        message = (
            f"Invalid keys in 'logit_bias': {keys}; keys are token ids from 0 to "
            f"{vocab_size - 1}, since the vocabulary has {vocab_size}."
        )
        raise invalid(message, "logit_bias")
    try:
        return {int(name): bias for name, bias in BIASES.validate_python(biases).items()}
    except ValidationError as error:
        raise to_request_error(error, biases, "logit_bias") from None


def _is_token_id(name: str, vocab_size: int) -> bool:
    return name.isascii() and name.isdigit() and len(name) <= 10 and int(name) < vocab_size
