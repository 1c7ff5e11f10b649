"""The fields that chat and text completions share."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter

from ...proto.packed_logprobs import MAX_LOGPROBS
from ..errors import invalid
from ..generation import EarlyStopping
from ..options import RouterOptions
from ..requests.body_errors import check_integer, too_long, wrong_type
from ..requests.body_model import BOUNDED, INT32, INT64, WHOLE, BodyModel, DocumentedAs
from .structured_outputs import ConstrainedBody

MAX_STOPS = 64
MAX_STOP_LENGTH = 1024
MAX_STOP_IDS = 256
MAX_ALLOWED_IDS = 1024
MAX_BIAS = 1024
MAX_WORDS = 256
MAX_WORD_LENGTH = 256
MAX_STREAM_OPTIONS = 16

# Known parameters that are not implemented, with the values that have no effect.
COMMON_UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "logits_processors": ([],),
    "guided_whitespace_pattern": (),
    "guided_decoding_backend": ("auto", "guidance", "llguidance"),
    "kv_transfer_params": (),
    "vllm_xargs": ({},),
    "repetition_detection": (),
    "ec_transfer_params": (),
    "watermarking": (False,),
}


def _check_stops(value: Any) -> Any:
    """Check ``stop``, with one message for items of any invalid kind."""
    if not isinstance(value, (str, list)):
        raise wrong_type("stop", "an array", value)
    if len(stops := [value] if isinstance(value, str) else value) > MAX_STOPS:
        raise too_long("stop", value, MAX_STOPS)
    for stop in stops:
        if not isinstance(stop, str):
            raise wrong_type("stop", "a string or an array of strings", stop)
        if not 0 < len(stop) <= MAX_STOP_LENGTH:
            raise invalid(
                f"Invalid 'stop': each string must have 1 to {MAX_STOP_LENGTH} characters, "
                f"not {len(stop)}.",
                "stop",
            )
    return value


StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
Stops = StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS)]
Word = Annotated[str, Field(max_length=MAX_WORD_LENGTH)]
Bias = Annotated[float, Field(ge=-100, le=100), BOUNDED]
BIASES = TypeAdapter(dict[str, Bias], config=ConfigDict(strict=True, allow_inf_nan=False))


# The number of alternatives listed for each token; the server sets the upper limit.
Alternatives = Annotated[int, Field(ge=0), WHOLE]


class StreamOptions(BodyModel):
    """Options of a stream. Obfuscation, which pads chunks against traffic analysis, is accepted
    without effect."""

    include_usage: bool = False
    continuous_usage_stats: bool = False  # only with include_usage, as in vLLM
    include_obfuscation: Any = None


class GenerationBody(ConstrainedBody):
    """The parameters that chat and text completions share. A sampling parameter without a default
    takes the value of the model's generation_config.json."""

    model: Annotated[str, Field(max_length=1024)] = ""
    stream: bool = False
    stream_options: Annotated[
        dict[str, Any], Field(max_length=MAX_STREAM_OPTIONS), DocumentedAs(StreamOptions | None)
    ] = Field(default_factory=dict)
    seed: Annotated[int, Field(ge=-INT64, le=INT64 - 1), WHOLE] | None = None
    logit_bias: Annotated[
        dict[str, Any], Field(max_length=MAX_BIAS), DocumentedAs(dict[str, Bias])
    ] = Field(default_factory=dict)
    ignore_eos: bool = False
    allowed_token_ids: Annotated[list[int], Field(max_length=MAX_ALLOWED_IDS)] = Field(
        default_factory=list
    )
    bad_words: Annotated[list[Word], Field(max_length=MAX_WORDS)] = Field(default_factory=list)
    logprob_token_ids: Annotated[list[int], Field(max_length=MAX_LOGPROBS)] = Field(
        default_factory=list
    )
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOP_IDS)] = Field(
        default_factory=list
    )
    n: Annotated[int, Field(ge=1), WHOLE] = 1
    best_of: Annotated[int, Field(ge=1), WHOLE] | None = None
    use_beam_search: bool = False
    length_penalty: Annotated[float, Field(ge=-10, le=10), BOUNDED] = 1.0
    early_stopping: EarlyStopping = False
    prompt_logprobs: Alternatives | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=INT32 - 1), WHOLE] | None = None
    truncation_side: Literal["left", "right"] = "left"
    priority: Annotated[int, Field(ge=-INT32, le=INT32 - 1), WHOLE] = 0
    cache_salt: Annotated[str, Field(max_length=256)] = ""
    stop: Annotated[Stops, BeforeValidator(_check_stops)] = Field(default_factory=list)
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    min_tokens: Annotated[int, Field(ge=0, le=INT32 - 1), WHOLE] = 0
    # Accepted without effect: OpenAI uses them for its own accounting.
    user: Any = None
    metadata: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None


def check_alternatives(name: str, count: int | None, options: RouterOptions) -> None:
    """Raise ``RequestError`` if ``count``, the value of the field ``name``, exceeds
    --max-logprobs."""
    if count is not None:
        check_integer(name, count, 0, options.max_logprobs)
