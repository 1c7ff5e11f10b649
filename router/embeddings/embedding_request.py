"""POST /v1/embeddings: from the body to a ``GenerationRequest`` that generates nothing."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from ...proto import tandem_pb2 as pb
from ..errors import invalid
from ..generation import EncodedPrompt, GenerationRequest, TextOptions, VectorOptions, new_tokens
from ..options import RouterOptions
from ..requests.body_errors import check_token, wrong_type
from ..requests.body_model import INT32, WHOLE, BodyModel, DocumentedAs
from ..requests.context import check_context, encode_one
from ..requests.truncation import most_prompt_tokens, read_truncation
from ..served_model import ServedModel

# As in OpenAI's API.
MAX_INPUTS = 2048


class CreateEmbeddingRequest(BodyModel):
    """The body of POST /v1/embeddings."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "messages": (),
        "chat_template": (),
        "embed_dtype": ("float32",),
        "endianness": ("native", "little"),
        "use_activation": (True,),
        "mm_processor_kwargs": ({},),
    }

    model: Annotated[str, Field(max_length=1024)] = ""
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Field(ge=1, le=INT32 - 1), WHOLE] | None = None
    normalize: bool = True
    priority: Annotated[int, Field(ge=-INT32, le=INT32 - 1), WHOLE] = 0
    cache_salt: Annotated[str, Field(max_length=256)] = ""
    add_special_tokens: bool = True
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=INT32 - 1), WHOLE] | None = None
    truncation_side: Literal["left", "right"] = "right"
    prompt_name: Annotated[str, Field(max_length=256)] | None = None
    input: Annotated[Any, DocumentedAs(str | list[str] | list[int] | list[list[int]])]
    # Accepted without effect: OpenAI uses it for its own accounting.
    user: Any = None


def parse_embedding(body: Any, model: ServedModel, options: RouterOptions) -> GenerationRequest:
    """Check a body, tokenize its inputs. Raises ``RequestError``."""
    ignored: set[str] = set()
    asked = CreateEmbeddingRequest.read(body, ignored)
    model.check_name(asked.model)
    prompts = _prompts(asked, model)
    return GenerationRequest(
        request_id=f"embd-{uuid.uuid4().hex}",
        model=model,
        prompts=[EncodedPrompt(new_tokens(tokens)) for tokens in prompts],
        max_tokens=[1] * len(prompts),
        sampling=pb.Sampling(n=1),
        text=TextOptions(),
        stream=False,
        include_usage=False,
        priority=asked.priority,
        cache_salt=asked.cache_salt,
        ignored=ignored,
        embed=VectorOptions(
            pooling=options.pooling,
            normalize=asked.normalize,
            dimensions=asked.dimensions or 0,
            in_base64=asked.encoding_format == "base64",
        ),
    )


def _prompts(asked: CreateEmbeddingRequest, model: ServedModel) -> list[list[int]]:
    """The tokens of each input: a string, token ids, or a list of either kind."""
    value = asked.input
    reader = _Reader(asked, model)
    if isinstance(value, str):
        return [reader.text(value, "input")]
    if not isinstance(value, list):
        raise wrong_type("input", "a string or an array", value)
    if not value:
        raise invalid("Invalid 'input': empty array.", "input", "empty_array")
    if isinstance(value[0], int):
        return [reader.tokens(value, "input")]
    if len(value) > MAX_INPUTS:
        message = f"Invalid 'input': {len(value)} inputs, the limit is {MAX_INPUTS}."
        raise invalid(message, "input", "array_above_max_length")
    return [reader.item(item, type(value[0]), f"input[{i}]") for i, item in enumerate(value)]


class _Reader:
    """The tokens of inputs, as a body asks for them."""

    def __init__(self, asked: CreateEmbeddingRequest, model: ServedModel) -> None:
        self._asked = asked
        self._model = model
        self._cut = read_truncation(asked, most_prompt_tokens(model, 0))
        self._prompt = model.tokenizer.prompts.of(asked.prompt_name)

    def item(self, value: Any, kind: type, param: str) -> list[int]:
        """One of several inputs, which are all of one ``kind``."""
        if type(value) is not kind or not isinstance(value, (str, list)):
            raise invalid(
                "Invalid type for 'input': an array must hold only strings, only token ids, or "
                "only arrays of token ids.",
                "input",
                "invalid_type",
            )
        return self.text(value, param) if isinstance(value, str) else self.tokens(value, param)

    def text(self, text: str, param: str) -> list[int]:
        """The tokens of a text after its prompt."""
        model, special = self._model, self._asked.add_special_tokens
        tokens: list[int] = []
        if text:
            tokens = encode_one(
                self._prompt + text, model, self._cut, param="input", add_special_tokens=special
            )
        if not tokens:
            raise invalid(f"Invalid '{param}': the input is empty.", "input", "empty_string")
        check_context([len(tokens)], 0, model, param="input", default=1)
        return tokens

    def tokens(self, tokens: list[Any], param: str) -> list[int]:
        """Tokens that were given as such, which no prompt precedes."""
        if self._asked.prompt_name is not None:
            raise invalid("'prompt_name' needs an input of texts.", "prompt_name")
        if not tokens:
            raise invalid(f"Invalid '{param}': the input is empty.", "input", "empty_array")
        if self._cut is not None:
            tokens = self._cut.cut(tokens)
        # Before the loop: a list of millions must cost nothing.
        check_context([len(tokens)], 0, self._model, param="input", default=1)
        for i, token in enumerate(tokens):
            check_token(f"{param}[{i}]", token, self._model.vocab_size)
        return tokens
