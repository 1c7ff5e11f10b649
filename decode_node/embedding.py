"""Vectors of prompts for the router, and scores of a classifier: sequences that are computed and
generate nothing."""

from __future__ import annotations

from ..proto import tandem_pb2 as pb
from ..shared.engine.hidden_states import check_result_size, scores_of, vector_of
from ..shared.engine.sequence import Sequence
from ..shared.engine.start import NodeEngine
from ..shared.errors import RequestError
from ..shared.models.spec import POOLINGS


def make_embedding(sequences: list[Sequence], embed: pb.Embed, engine: NodeEngine) -> None:
    """Have the only sequence of a request compute its prompt, and keep its hidden states or its
    scores. Raises ``RequestError``."""
    if len(sequences) != 1:
        raise RequestError(f"n is {len(sequences)}; a prompt has one vector", param="n")
    [sequence] = sequences
    if embed.score:
        _score(sequence, embed, engine)
    else:
        _embed(sequence, embed, engine)
    sequence.compute_until = len(sequence.prompt)


def _score(sequence: Sequence, embed: pb.Embed, engine: NodeEngine) -> None:
    scorer = engine.scorer()
    if embed.second_text >= len(sequence.prompt):
        raise RequestError(
            f"second_text is {embed.second_text}; the prompt has {len(sequence.prompt)} tokens"
        )
    check_result_size(engine.resolved.max_num_seqs, len(scorer.labels))
    sequence.pooling, sequence.classify = scorer.pooling, True
    # Tokenizers number the texts of a pair for models, too, that have one segment only.
    sequence.second_text = embed.second_text if engine.spec.segments > 1 else 0


def _embed(sequence: Sequence, embed: pb.Embed, engine: NodeEngine) -> None:
    engine.check_embeds()
    size = engine.spec.vector_size
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
    sequence.pooling = pooling


def embedding_event(sequence: Sequence, embed: pb.Embed, engine: NodeEngine) -> pb.GenerateEvent:
    """The vector or the scores of a sequence that has been computed."""
    if embed.score:
        values = scores_of(sequence, engine.scorer().activation if embed.normalize else "none")
    else:
        values = vector_of(sequence, normalize=embed.normalize, dimensions=embed.dimensions or None)
    return pb.GenerateEvent(embedding=pb.Embedding(values=values.astype("<f4").tobytes()))
