"""Bound on the logprobs of requests that list hundreds of alternatives for each token: those of one
step travel from a rank in one message."""

from __future__ import annotations

from collections.abc import Iterable

from ..proto import tandem_pb2 as pb
from ..shared.errors import OverloadedError, RequestError

# Requests with at most so many alternatives are bounded by the size of a step alone.
NARROW = 64
# Of all running requests with more: 16 MiB of a message.
MOST_LOGPROBS = 1 << 21


def check_logprobs(request: pb.GenerateRequest, running: Iterable[pb.GenerateRequest]) -> None:
    """Raise ``RequestError`` for a request that lists too many logprobs at once, and
    ``OverloadedError`` for one that does so together with those that are ``running``."""
    listed = _listed(request)
    if listed > MOST_LOGPROBS:
        raise RequestError(
            f"The request asks for {listed} logprobs at once; the limit is {MOST_LOGPROBS}. Lower "
            "'logprobs' or 'top_logprobs', 'prompt_logprobs', 'n' or the length of the prompt.",
            code="answer_too_large",
        )
    if listed and listed + sum(map(_listed, running)) > MOST_LOGPROBS:
        raise OverloadedError("too many requests list hundreds of logprobs for each token")


def _listed(request: pb.GenerateRequest) -> int:
    sampling = request.sampling
    generated, prompt = sampling.logprobs, sampling.prompt_logprobs
    listed = generated * (sampling.n or 1) if generated > NARROW else 0
    return listed + (prompt * len(request.prompt) if prompt > NARROW else 0)
