"""Vectors of prompts and scores of a classifier: sequences that are computed, not continued."""

from __future__ import annotations

from ..proto import tandem_pb2 as pb
from ..shared.engine.hidden_states import check_result_size, scores_of, vector_of
from ..shared.engine.sequence import Sequence
from ..shared.engine.start import NodeEngine
from ..shared.engine.work import Pool
from ..shared.errors import RequestError
from ..shared.models.spec import POOLINGS


def pooling_work(request: pb.GenerateRequest, engine: NodeEngine) -> Pool:
    """The pooling of a request's only sequence. Raises ``RequestError``."""
    if request.sampling.n > 1:
        raise RequestError(f"n is {request.sampling.n}; a prompt has one vector", param="n")
    if request.resume:
        raise RequestError("a request with embed has no choice to resume")
    work = _scores if request.embed.score else _vector
    return work(request, engine)


def _scores(request: pb.GenerateRequest, engine: NodeEngine) -> Pool:
    scorer, second = engine.scorer(), request.embed.second_text
    if second >= len(request.prompt):
        raise RequestError(f"second_text is {second}; the prompt has {len(request.prompt)} tokens")
    check_result_size(engine.resolved.max_num_seqs, len(scorer.labels))
    # Tokenizers number the texts of a pair even for models with a single segment.
    return Pool(scorer.pooling, True, second if engine.spec.segments > 1 else 0)


def _vector(request: pb.GenerateRequest, engine: NodeEngine) -> Pool:
    engine.check_embeds()
    embed, size = request.embed, engine.spec.vector_size
    pooling = embed.pooling or engine.spec.pooling
    if pooling not in POOLINGS:
        raise RequestError(f"pooling is {pooling!r}; it must be one of {', '.join(POOLINGS)}")
    if embed.dimensions > size:
        raise RequestError(
            f"'dimensions' is {embed.dimensions}, but this model's vectors have {size} numbers.",
            param="dimensions",
            code="integer_above_max_value",
        )
    check_result_size(engine.resolved.max_num_seqs, size)
    return Pool(pooling)


def embedding_event(sequence: Sequence, embed: pb.Embed, engine: NodeEngine) -> pb.GenerateEvent:
    """The vector or the scores of a sequence that has been computed."""
    if embed.score:
        values = scores_of(sequence, engine.scorer().activation if embed.normalize else "none")
    else:
        values = vector_of(sequence, normalize=embed.normalize, dimensions=embed.dimensions or None)
    return pb.GenerateEvent(embedding=pb.Embedding(values=values.astype("<f4").tobytes()))
