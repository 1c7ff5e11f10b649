"""POST /v1/completions: from the body to a ``GenerationRequest``."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field

from ..errors import invalid
from ..generation import EncodedPrompt, GenerationRequest, new_tokens
from ..options import RouterOptions
from ..requests.body_errors import check_integer, wrong_type
from ..requests.body_model import WHOLE, DocumentedAs
from ..requests.context import check_context, encode_text
from ..requests.response_size import ResponseSize
from ..served_model import ServedModel
from .request_fields import (
    COMMON_UNSUPPORTED,
    INT32,
    MAX_LOGPROBS,
    GenerationBody,
    check_min_tokens,
    read_shared,
    read_text_options,
)

DEFAULT_MAX_TOKENS = 16
COMPLETION_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    name: neutral for name, neutral in COMMON_UNSUPPORTED.items() if name != "best_of"
} | {"suffix": ("",), "prompt_embeds": ()}


class CompletionRequest(GenerationBody):
    """The body of POST /v1/completions."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = COMPLETION_UNSUPPORTED

    best_of: Annotated[int, Field(ge=1, le=INT32 - 1), WHOLE] | None = None
    echo: bool = False
    # 0 with ``echo`` only.
    max_tokens: (
        Annotated[int, Field(le=INT32 - 1, json_schema_extra={"minimum": 0}), WHOLE] | None
    ) = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS), WHOLE] | None = None
    prompt: Annotated[Any, DocumentedAs(str | list[str] | list[int] | list[list[int]])]
    add_special_tokens: bool = True


def parse_completion(body: Any, model: ServedModel, options: RouterOptions) -> GenerationRequest:
    """Check a body, tokenize its prompts. Raises ``RequestError``."""
    ignored: set[str] = set()
    asked = CompletionRequest.read(body, ignored)
    shared = read_shared(asked, ignored, model, options)
    n, echo, wanted, logprobs = asked.n, asked.echo, asked.max_tokens, asked.logprobs
    _check_best_of(asked)
    if wanted is not None:
        check_integer("max_tokens", wanted, 0 if echo else 1, INT32 - 1)
    text = read_text_options(asked, echo=echo, discard_output=wanted == 0)
    prompts = _prompts(asked, model, options)
    if echo:
        prompts = [_with_text(prompt, model, text.skip_special_tokens) for prompt in prompts]
    _check_choices(len(prompts), n, options)
    granted = check_context(
        [len(prompt.tokens) for prompt in prompts],
        # A node always samples one token; with max_tokens 0 it is discarded.
        1 if wanted == 0 else wanted,
        model,
        param="prompt",
        default=DEFAULT_MAX_TOKENS,
    )
    prompt_logprobs = shared["prompt_logprobs"]
    size = ResponseSize(
        prompts=[len(prompt.tokens) for prompt in prompts],
        n=n,
        logprobs=logprobs,
        prompt_alternatives=logprobs if prompt_logprobs is None and echo else prompt_logprobs,
        echoed=sum(len(prompt.text or "") for prompt in prompts),
        token_ids=shared["return_token_ids"],
        stream=shared["stream"],
    )
    size.check(granted, options)
    check_min_tokens(text.min_tokens, granted)
    return GenerationRequest(
        request_id=f"cmpl-{uuid.uuid4().hex}",
        prompts=prompts,
        max_tokens=granted,
        text=text,
        logprobs=logprobs,
        ignored=ignored,
        **shared,
    )


def _prompts(
    asked: CompletionRequest, model: ServedModel, options: RouterOptions
) -> list[EncodedPrompt]:
    """The prompts: a string, token ids, or a list of either kind."""
    value = asked.prompt
    if isinstance(value, str):
        return [_from_text(value, asked, model, "prompt")]
    if not isinstance(value, list):
        raise wrong_type("prompt", "a string or an array", value)
    if not value:
        raise invalid("Invalid 'prompt': empty array.", "prompt", "empty_array")
    if isinstance(value[0], int):
        return [_from_tokens(value, model, "prompt")]
    if len(value) > options.max_prompts:
        raise invalid(
            f"Invalid 'prompt': {len(value)} prompts, the limit is {options.max_prompts}.",
            "prompt",
            "array_above_max_length",
        )
    if all(isinstance(item, str) for item in value):
        return [_from_text(item, asked, model, f"prompt[{i}]") for i, item in enumerate(value)]
    if all(isinstance(item, list) for item in value):
        return [_from_tokens(item, model, f"prompt[{i}]") for i, item in enumerate(value)]
    raise invalid(
        "Invalid type for 'prompt': an array must hold only strings, only token ids, or only "
        "arrays of token ids.",
        "prompt",
        "invalid_type",
    )


def _from_text(
    text: str, asked: CompletionRequest, model: ServedModel, param: str
) -> EncodedPrompt:
    if not text:
        raise invalid(f"Invalid '{param}': the prompt is empty.", "prompt", "empty_string")
    special = asked.add_special_tokens
    tokens = encode_text(text, model, param="prompt", add_special_tokens=special)
    if not tokens:
        raise invalid(f"Invalid '{param}': the prompt has no tokens.", "prompt", "empty_string")
    return EncodedPrompt(new_tokens(tokens), text if asked.echo else None)


def _from_tokens(tokens: list[Any], model: ServedModel, param: str) -> EncodedPrompt:
    if not tokens:
        raise invalid(f"Invalid '{param}': the prompt is empty.", "prompt", "empty_array")
    # Before the loop: a list of millions must cost nothing.
    check_context([len(tokens)], None, model, param="prompt", default=1)
    for i, token in enumerate(tokens):
        check_integer(f"{param}[{i}]", token, 0, model.vocab_size - 1)
    return EncodedPrompt(new_tokens(tokens))


def _with_text(
    prompt: EncodedPrompt, model: ServedModel, skip_special_tokens: bool
) -> EncodedPrompt:
    if prompt.text is not None:
        return prompt
    text = model.tokenizer.decode(prompt.tokens, skip_special_tokens=skip_special_tokens)
    return EncodedPrompt(prompt.tokens, text)


def _check_choices(prompts: int, n: int, options: RouterOptions) -> None:
    if prompts * n > options.max_choices:
        raise invalid(
            f"{prompts} prompts with 'n' of {n} make {prompts * n} choices; the limit is "
            f"{options.max_choices}.",
            "n",
        )


def _check_best_of(asked: CompletionRequest) -> None:
    if asked.best_of not in (None, asked.n):
        message = "'best_of' is not supported by this server unless it equals 'n'."
        raise invalid(message, "best_of", "unsupported_parameter")
