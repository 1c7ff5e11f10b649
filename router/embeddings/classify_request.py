"""POST /classify: from the body to a ``GenerationRequest`` that labels texts."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any, ClassVar

from ...proto import tandem_pb2 as pb
from ..errors import invalid
from ..generation import GenerationRequest, TextOptions, VectorOptions
from ..options import RouterOptions
from ..served_model import ServedModel
from .text_inputs import InputBody, read_inputs


class ClassifyBody(InputBody):
    """The body of POST /classify."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "messages": (),
        "chat_template": (),
        "mm_processor_kwargs": ({},),
    }

    use_activation: bool = True


def parse_classify(body: Any, model: ServedModel, options: RouterOptions) -> GenerationRequest:
    """Check a body, tokenize its inputs. Raises ``RequestError`` or ``ApiError``."""
    ignored: set[str] = set()
    asked = ClassifyBody.read(body, ignored)
    model.check_name(asked.model)
    if model.scoring not in ("pair", "labels"):
        raise invalid(
            f"The model '{model.name}' has no classifier; use one whose architecture ends in "
            f"ForSequenceClassification.",
            "model",
            "model_cannot_classify",
        )
    prompts = read_inputs(asked, model)
    return GenerationRequest(
        request_id=f"classify-{uuid.uuid4().hex}",
        model=model,
        prompts=prompts,
        max_tokens=[1] * len(prompts),
        sampling=pb.Sampling(n=1),
        text=TextOptions(),
        stream=False,
        include_usage=False,
        priority=asked.priority,
        cache_salt=asked.cache_salt,
        ignored=ignored,
        embed=VectorOptions(pooling=None, normalize=asked.use_activation, score=True),
    )
