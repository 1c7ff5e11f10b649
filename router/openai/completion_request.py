"""POST /v1/completions: from the body to an ``OpenAIRequest``."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field

from ..errors import invalid
from ..generation import EncodedPrompt, new_tokens
from ..options import RouterOptions
from ..requests.body_errors import check_integer, check_token, wrong_type
from ..requests.body_model import INT32, WHOLE, DocumentedAs
from ..requests.context import check_context, encode_around_gap, encode_text
from ..requests.response_size import ResponseSize
from ..requests.truncation import Truncation, max_prompt_tokens, read_truncation
from ..served_model import ServedModel
from .generation_body import COMMON_UNSUPPORTED, Alternatives, GenerationBody, check_alternatives
from .request_fields import (
    OpenAIRequest,
    check_min_tokens,
    listed_logprobs,
    read_shared,
    read_text_options,
)

DEFAULT_MAX_TOKENS = 16
COMPLETION_UNSUPPORTED: dict[str, tuple[Any, ...]] = COMMON_UNSUPPORTED | {
    "prompt_embeds": (),
    "thinking_token_budget": (-1,),  # reasoning is not parsed here
}


class CompletionRequest(GenerationBody):
    """The body of POST /v1/completions."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = COMPLETION_UNSUPPORTED

    echo: bool = False
    # 0 is allowed with ``echo`` only.
    max_tokens: (
        Annotated[int, Field(le=INT32 - 1, json_schema_extra={"minimum": 0}), WHOLE] | None
    ) = None
    logprobs: Alternatives | None = None
    prompt: Annotated[Any, DocumentedAs(str | list[str] | list[int] | list[list[int]])]
    add_special_tokens: bool = True
    suffix: str = ""


def parse_completion(body: Any, model: ServedModel, options: RouterOptions) -> OpenAIRequest:
    """Check a body and tokenize its prompts. Raises ``RequestError``."""
    ignored: set[str] = set()
    request = CompletionRequest.read(body, ignored)
    shared = read_shared(request, ignored, model, options)
    echo, logprobs, requested = request.echo, request.logprobs, request.max_tokens
    check_alternatives("logprobs", logprobs, options)
    n = shared["sampling"].n
    if request.suffix:
        _check_suffix(request)
        shared["sampling"].stop_token_ids.extend(_ends(request, model))
    if request.logprob_token_ids and (logprobs is None or requested == 0):
        message = "'logprob_token_ids' is only allowed with 'logprobs' and generated tokens."
        raise invalid(message, "logprob_token_ids")
    if requested is not None:
        check_integer("max_tokens", requested, 0 if echo and not shared["beams"] else 1, INT32 - 1)
    if shared["beams"] and echo and logprobs is not None:
        message = "'logprobs' of an 'echo' are not available with 'use_beam_search'."
        raise invalid(message, "logprobs", "unsupported_value")
    text = read_text_options(request, echo=echo, discard_output=requested == 0)
    truncation = read_truncation(request, max_prompt_tokens(model, requested or 1))
    prompts = _PromptReader(request, model, options, truncation).read()
    if echo:
        prompts = [_with_text(prompt, model) for prompt in prompts]
    _check_choices(len(prompts), n, options)
    max_tokens = check_context(
        [len(prompt.tokens) for prompt in prompts],
        # A node always samples a token; with max_tokens 0 it is discarded.
        1 if requested == 0 else requested,
        model,
        param="prompt",
        default=DEFAULT_MAX_TOKENS,
    )
    prompt_logprobs = shared["prompt_logprobs"]
    size = ResponseSize(
        prompts=[len(prompt.tokens) for prompt in prompts],
        n=n,
        logprobs=listed_logprobs(logprobs, request),
        prompt_alternatives=logprobs if prompt_logprobs is None and echo else prompt_logprobs,
        echoed=sum(len(prompt.text or "") for prompt in prompts),
        token_ids=shared["return_token_ids"],
        stream=shared["stream"],
    )
    if requested is None and model.defaults.max_tokens is not None:
        max_tokens = size.fit(max_tokens, options)
    size.check(max_tokens, options)
    check_min_tokens(text.min_tokens, max_tokens)
    return OpenAIRequest(
        request_id=f"cmpl-{uuid.uuid4().hex}",
        prompts=prompts,
        max_tokens=max_tokens,
        text=text,
        logprobs=logprobs,
        ignored=ignored,
        **shared,
    )


def _check_suffix(request: CompletionRequest) -> None:
    for name, is_set in (
        ("echo", request.echo),
        ("truncate_prompt_tokens", request.truncate_prompt_tokens is not None),
    ):
        if is_set:
            raise invalid(f"'{name}' is not available with 'suffix'.", name)


def _ends(request: CompletionRequest, model: ServedModel) -> tuple[int, ...]:
    """The tokens that end a text in a gap."""
    markers = model.tokenizer.fill_in_middle
    return () if markers is None or request.ignore_eos else markers.ends


class _PromptReader:
    """Reads the prompts of a body: a string, token ids, or a list of either."""

    def __init__(
        self,
        request: CompletionRequest,
        model: ServedModel,
        options: RouterOptions,
        truncation: Truncation | None,
    ) -> None:
        self._request = request
        self._model = model
        self._options = options
        self._truncation = truncation

    def read(self) -> list[EncodedPrompt]:
        value = self._request.prompt
        if isinstance(value, str):
            return [self._from_text(value, "prompt")]
        if not isinstance(value, list):
            raise wrong_type("prompt", "a string or an array", value)
        if not value:
            raise invalid("Invalid 'prompt': empty array.", "prompt", "empty_array")
        if isinstance(value[0], int):
            return [self._from_tokens(value, "prompt")]
        if len(value) > (limit := self._options.max_prompts):
            raise invalid(
                f"Invalid 'prompt': {len(value)} prompts, the limit is {limit}.",
                "prompt",
                "array_above_max_length",
            )
        if all(isinstance(item, str) for item in value):
            return [self._from_text(item, f"prompt[{i}]") for i, item in enumerate(value)]
        if all(isinstance(item, list) for item in value):
            return [self._from_tokens(item, f"prompt[{i}]") for i, item in enumerate(value)]
        raise invalid(
            "Invalid type for 'prompt': an array must hold only strings, only token ids, or only "
            "arrays of token ids.",
            "prompt",
            "invalid_type",
        )

    def _from_text(self, text: str, param: str) -> EncodedPrompt:
        if not text and not self._request.suffix:
            raise invalid(f"Invalid '{param}': the prompt is empty.", "prompt", "empty_string")
        tokens = self._encode(text)
        if not tokens:
            raise invalid(f"Invalid '{param}': the prompt has no tokens.", "prompt", "empty_string")
        truncated = self._truncated(tokens)
        echoes = self._request.echo and len(truncated) == len(tokens)
        return EncodedPrompt(new_tokens(truncated), text if echoes else None)

    def _encode(self, text: str) -> list[int]:
        special = self._request.add_special_tokens
        if self._request.suffix:
            return encode_around_gap(
                text, self._request.suffix, self._model, add_special_tokens=special
            )
        return encode_text(
            text,
            self._model,
            param="prompt",
            add_special_tokens=special,
            truncated=self._truncation is not None,
        )

    def _from_tokens(self, tokens: list[Any], param: str) -> EncodedPrompt:
        if not tokens:
            raise invalid(f"Invalid '{param}': the prompt is empty.", "prompt", "empty_array")
        if self._request.suffix:
            raise invalid("With 'suffix', prompts must be texts, not token ids.", "prompt")
        tokens = self._truncated(tokens)
        # Checked before the loop, so that a list of millions is rejected at once.
        check_context([len(tokens)], None, self._model, param="prompt", default=1)
        for i, token in enumerate(tokens):
            check_token(f"{param}[{i}]", token, self._model.vocab_size)
        return EncodedPrompt(new_tokens(tokens))

    def _truncated(self, tokens: list[Any]) -> list[Any]:
        return tokens if self._truncation is None else self._truncation.cut(tokens)


def _with_text(prompt: EncodedPrompt, model: ServedModel) -> EncodedPrompt:
    if prompt.text is not None:
        return prompt
    text = model.tokenizer.decode(prompt.tokens, skip_special_tokens=False)
    return EncodedPrompt(prompt.tokens, text, spelled=True)


def _check_choices(prompts: int, n: int, options: RouterOptions) -> None:
    if prompts * n > options.max_choices:
        raise invalid(
            f"{prompts} prompts with 'n' of {n} make {prompts * n} choices; the limit is "
            f"{options.max_choices}.",
            "n",
        )
