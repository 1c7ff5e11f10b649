"""POST /classify: from the body to a ``GenerationRequest`` that labels texts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from ..errors import invalid
from ..generation import GenerationRequest, VectorOptions
from ..options import RouterOptions
from ..served_model import ServedModel
from .text_inputs import InputBody, pooling_request, read_inputs


class ClassifyBody(InputBody):
    """The body of POST /classify."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "messages": (),
        "chat_template": (),
        "mm_processor_kwargs": ({},),
    }

    use_activation: bool = True


def parse_classify(body: Any, model: ServedModel, options: RouterOptions) -> GenerationRequest:
    """Check a body and tokenize its inputs. Raises ``RequestError`` or ``ApiError``."""
    ignored: set[str] = set()
    request = ClassifyBody.read(body, ignored)
    model.check_name(request.model)
    if model.scoring not in ("pair", "labels"):
        raise invalid(
            f"The model '{model.name}' has no classifier; use one whose architecture ends in "
            f"ForSequenceClassification.",
            "model",
            "model_cannot_classify",
        )
    prompts = read_inputs(request, model)
    embed = VectorOptions(pooling=None, normalize=request.use_activation, score=True)
    return pooling_request(
        "classify",
        model,
        prompts,
        embed,
        priority=request.priority,
        cache_salt=request.cache_salt,
        ignored=ignored,
    )
