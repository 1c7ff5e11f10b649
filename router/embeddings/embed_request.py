"""POST /v1/embeddings: from the body to a ``GenerationRequest`` that generates nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from ..generation import GenerationRequest, VectorOptions
from ..options import RouterOptions
from ..requests.body_model import INT32, WHOLE
from ..served_model import ServedModel
from .text_inputs import InputBody, pooling_request, read_inputs


class CreateEmbeddingRequest(InputBody):
    """The body of POST /v1/embeddings."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "messages": (),
        "chat_template": (),
        "embed_dtype": ("float32",),
        "endianness": ("native", "little"),
        "use_activation": (True,),
        "mm_processor_kwargs": ({},),
    }

    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Field(ge=1, le=INT32 - 1), WHOLE] | None = None
    normalize: bool = True
    prompt_name: Annotated[str, Field(max_length=256)] | None = None


def parse_embedding(body: Any, model: ServedModel, options: RouterOptions) -> GenerationRequest:
    """Check a body and tokenize its inputs. Raises ``RequestError``."""
    ignored: set[str] = set()
    request = CreateEmbeddingRequest.read(body, ignored)
    model.check_name(request.model)
    name = request.prompt_name
    prompts = read_inputs(request, model, prompt=model.tokenizer.prompts.of(name), prompt_name=name)
    embed = VectorOptions(
        pooling=options.pooling,
        normalize=request.normalize,
        dimensions=request.dimensions or 0,
        in_base64=request.encoding_format == "base64",
    )
    return pooling_request(
        "embd",
        model,
        prompts,
        embed,
        priority=request.priority,
        cache_salt=request.cache_salt,
        ignored=ignored,
    )
