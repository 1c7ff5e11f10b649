"""The ``options`` of a request: Ollama's names of sampling parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field

from ...proto import tandem_pb2 as pb
from ..requests.body_model import BOUNDED, INT32, INT64, WHOLE, BodyModel
from ..served_model import ServedModel

Stop = Annotated[str, Field(min_length=1, max_length=1024)]


class OllamaOptions(BodyModel):
    """Sampling parameters; those without a value have the model's defaults."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "mirostat": (0,),
        "tfs_z": (1, 1.0),
        "typical_p": (1, 1.0),
        "repeat_last_n": (-1, 64),
    }

    temperature: Annotated[float, Field(ge=0, le=2), BOUNDED] | None = None
    top_p: Annotated[float, Field(gt=0, le=1), BOUNDED] | None = None
    top_k: Annotated[int, Field(ge=-1, le=INT32 - 1), WHOLE] | None = None
    min_p: Annotated[float, Field(ge=0, le=1), BOUNDED] | None = None
    repeat_penalty: Annotated[float, Field(gt=0, le=100), BOUNDED] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2), BOUNDED] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2), BOUNDED] | None = None
    seed: Annotated[int, Field(ge=-INT64, le=INT64 - 1), WHOLE] | None = None
    # -1 and -2: as many as fit.
    num_predict: Annotated[int, Field(ge=-2, le=INT32 - 1), WHOLE] = -1
    stop: Annotated[list[Stop], Field(max_length=64)] = Field(default_factory=list)
    num_ctx: Annotated[int, Field(ge=1, le=INT32 - 1), WHOLE] | None = None
    # Of a prompt that is cut; -1 is as much as possible.
    num_keep: Annotated[int, Field(ge=-1, le=INT32 - 1), WHOLE] | None = None
    # Accepted without effect: how a model is loaded is the operator's choice here.
    num_batch: Any = None
    num_gpu: Any = None
    main_gpu: Any = None
    num_thread: Any = None
    numa: Any = None
    low_vram: Any = None
    f16_kv: Any = None
    use_mmap: Any = None
    use_mlock: Any = None
    penalize_newline: Any = None
    mirostat_tau: Any = None
    mirostat_eta: Any = None

    @property
    def max_tokens(self) -> int | None:
        return self.num_predict if self.num_predict > 0 else None

    def sampling(self, model: ServedModel) -> pb.Sampling:
        """The node's sampling parameters."""
        return pb.Sampling(
            temperature=model.default("temperature", self.temperature),
            top_p=model.default("top_p", self.top_p),
            top_k=max(0, int(model.default("top_k", self.top_k))),
            min_p=model.default("min_p", self.min_p),
            repetition_penalty=model.default("repetition_penalty", self.repeat_penalty),
            presence_penalty=model.default("presence_penalty", self.presence_penalty),
            frequency_penalty=model.default("frequency_penalty", self.frequency_penalty),
            seed=self.seed,
            n=1,
        )
