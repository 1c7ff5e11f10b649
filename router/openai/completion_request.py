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
from .generation_body import COMMON_UNSUPPORTED, GenerationBody
from .logprob_fields import Alternatives, check_alternatives
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
    # 0 with ``echo`` only.
    max_tokens: (
        Annotated[int, Field(le=INT32 - 1, json_schema_extra={"minimum": 0}), WHOLE] | None
    ) = None
    logprobs: Alternatives | None = None
    prompt: Annotated[Any, DocumentedAs(str | list[str] | list[int] | list[list[int]])]
    add_special_tokens: bool = True
    suffix: str = ""


def parse_completion(body: Any, model: ServedModel, options: RouterOptions) -> OpenAIRequest:
    """Check a body, tokenize its prompts. Raises ``RequestError``."""
    ignored: set[str] = set()
    asked = CompletionRequest.read(body, ignored)
    shared = read_shared(asked, ignored, model, options)
    echo, wanted = asked.echo, asked.max_tokens
    logprobs = asked.logprobs
    check_alternatives("logprobs", logprobs, options)
    n = shared["sampling"].n
    if asked.suffix:
        _check_suffix(asked)
        shared["sampling"].stop_token_ids.extend(_ends(asked, model))
    if asked.logprob_token_ids and (logprobs is None or wanted == 0):
        message = "'logprob_token_ids' is only allowed with 'logprobs' and generated tokens."
        raise invalid(message, "logprob_token_ids")
    if wanted is not None:
        check_integer("max_tokens", wanted, 0 if echo and not shared["beams"] else 1, INT32 - 1)
    if shared["beams"] and echo and logprobs is not None:
        message = "'logprobs' of an 'echo' are not available with 'use_beam_search'."
        raise invalid(message, "logprobs", "unsupported_value")
    text = read_text_options(asked, echo=echo, discard_output=wanted == 0)
    most = max_prompt_tokens(model, wanted or 1)
    prompts = _PromptReader(asked, model, options, read_truncation(asked, most)).read()
    if echo:
        prompts = [_with_text(prompt, model) for prompt in prompts]
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
        logprobs=listed_logprobs(logprobs, asked),
        prompt_alternatives=logprobs if prompt_logprobs is None and echo else prompt_logprobs,
        echoed=sum(len(prompt.text or "") for prompt in prompts),
        token_ids=shared["return_token_ids"],
        stream=shared["stream"],
    )
    if wanted is None and model.defaults.max_tokens is not None:
        granted = size.fit(granted, options)
    size.check(granted, options)
    check_min_tokens(text.min_tokens, granted)
    return OpenAIRequest(
        request_id=f"cmpl-{uuid.uuid4().hex}",
        prompts=prompts,
        max_tokens=granted,
        text=text,
        logprobs=logprobs,
        ignored=ignored,
        **shared,
    )


def _check_suffix(asked: CompletionRequest) -> None:
    for name, given in (
        ("echo", asked.echo),
        ("truncate_prompt_tokens", asked.truncate_prompt_tokens is not None),
    ):
        if given:
            raise invalid(f"'{name}' is not available with 'suffix'.", name)


def _ends(asked: CompletionRequest, model: ServedModel) -> tuple[int, ...]:
    """The tokens that end the missing text."""
    known = model.tokenizer.fill_in_middle
    return () if known is None or asked.ignore_eos else known.ends


class _PromptReader:
    """The prompts of a body: a string, token ids, or a list of either kind."""

    def __init__(
        self,
        asked: CompletionRequest,
        model: ServedModel,
        options: RouterOptions,
        truncation: Truncation | None,
    ) -> None:
        self._asked = asked
        self._model = model
        self._options = options
        self._truncation = truncation

    def read(self) -> list[EncodedPrompt]:
        value = self._asked.prompt
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
        if not text and not self._asked.suffix:
            raise invalid(f"Invalid '{param}': the prompt is empty.", "prompt", "empty_string")
        tokens = self._encode(text)
        if not tokens:
            raise invalid(f"Invalid '{param}': the prompt has no tokens.", "prompt", "empty_string")
        kept = self._kept(tokens)
        whole = len(kept) == len(tokens)
        return EncodedPrompt(new_tokens(kept), text if self._asked.echo and whole else None)

    def _encode(self, text: str) -> list[int]:
        special = self._asked.add_special_tokens
        if self._asked.suffix:
            return encode_around_gap(
                text, self._asked.suffix, self._model, add_special_tokens=special
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
        if self._asked.suffix:
            raise invalid("With 'suffix', prompts must be texts, not token ids.", "prompt")
        tokens = self._kept(tokens)
        # Before the loop: a list of millions must cost nothing.
        check_context([len(tokens)], None, self._model, param="prompt", default=1)
        for i, token in enumerate(tokens):
            check_token(f"{param}[{i}]", token, self._model.vocab_size)
        return EncodedPrompt(new_tokens(tokens))

    def _kept(self, tokens: list[Any]) -> list[Any]:
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
