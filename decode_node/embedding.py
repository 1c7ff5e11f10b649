"""Vectors of prompts for the router: sequences that are computed and generate nothing."""

from __future__ import annotations

from ..proto import tandem_pb2 as pb
from ..shared.engine.hidden_states import check_result_size, vector_of
from ..shared.engine.sequence import Sequence
from ..shared.engine.start import NodeEngine
from ..shared.errors import RequestError
from ..shared.models.spec import POOLINGS


def make_embedding(sequences: list[Sequence], embed: pb.Embed, engine: NodeEngine) -> None:
    """Have the only sequence of a request compute its prompt, and keep its hidden states. Raises
    ``RequestError``."""
    hidden_size = engine.spec.hidden_size
    if len(sequences) != 1:
        raise RequestError(f"n is {len(sequences)}; a prompt has one vector", param="n")
    pooling = embed.pooling or engine.spec.pooling
    if pooling not in POOLINGS:
        raise RequestError(f"pooling is {pooling!r}; it must be one of {', '.join(POOLINGS)}")
    if embed.dimensions > hidden_size:
        raise RequestError(
            f"'dimensions' is {embed.dimensions}, but this model's vectors have {hidden_size} "
            "numbers.",
            param="dimensions",
            code="integer_above_max_value",
        )
    check_result_size(engine.resolved.max_num_seqs, hidden_size)
    [sequence] = sequences
    sequence.compute_until = len(sequence.prompt)
    sequence.pooling = pooling


def embedding_event(sequence: Sequence, embed: pb.Embed) -> pb.GenerateEvent:
    """The vector of a sequence that has been computed."""
    vector = vector_of(
        sequence, normalize=embed.normalize, dimensions=embed.dimensions or None
    ).astype("<f4")
    return pb.GenerateEvent(embedding=pb.Embedding(values=vector.tobytes()))
