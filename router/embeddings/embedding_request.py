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
from ..requests.context import check_context, encode_text
from ..served_model import ServedModel

# As in OpenAI's API.
MAX_INPUTS = 2048


class CreateEmbeddingRequest(BodyModel):
    """The body of POST /v1/embeddings."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "messages": (),
        "chat_template": (),
        "truncate_prompt_tokens": (),
        "truncation_side": (),
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
    if isinstance(value, str):
        return [_from_text(value, asked, model, "input")]
    if not isinstance(value, list):
        raise wrong_type("input", "a string or an array", value)
    if not value:
        raise invalid("Invalid 'input': empty array.", "input", "empty_array")
    if isinstance(value[0], int):
        return [_from_tokens(value, model, "input")]
    if len(value) > MAX_INPUTS:
        message = f"Invalid 'input': {len(value)} inputs, the limit is {MAX_INPUTS}."
        raise invalid(message, "input", "array_above_max_length")
    return [_from_item(item, asked, model, f"input[{i}]") for i, item in enumerate(value)]


def _from_item(
    item: Any, asked: CreateEmbeddingRequest, model: ServedModel, param: str
) -> list[int]:
    if type(item) is not type(asked.input[0]) or not isinstance(item, (str, list)):
        raise invalid(
            "Invalid type for 'input': an array must hold only strings, only token ids, or only "
            "arrays of token ids.",
            "input",
            "invalid_type",
        )
    if isinstance(item, str):
        return _from_text(item, asked, model, param)
    return _from_tokens(item, model, param)


def _from_text(
    text: str, asked: CreateEmbeddingRequest, model: ServedModel, param: str
) -> list[int]:
    special = asked.add_special_tokens
    tokens = encode_text(text, model, param="input", add_special_tokens=special) if text else []
    if not tokens:
        raise invalid(f"Invalid '{param}': the input is empty.", "input", "empty_string")
    check_context([len(tokens)], None, model, param="input", default=1)
    return tokens


def _from_tokens(tokens: list[Any], model: ServedModel, param: str) -> list[int]:
    if not tokens:
        raise invalid(f"Invalid '{param}': the input is empty.", "input", "empty_array")
    # Before the loop: a list of millions must cost nothing.
    check_context([len(tokens)], None, model, param="input", default=1)
    for i, token in enumerate(tokens):
        check_token(f"{param}[{i}]", token, model.vocab_size)
    return tokens
