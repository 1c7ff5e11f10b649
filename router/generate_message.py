"""The message that asks a node to serve one prompt of a request."""

from __future__ import annotations

import secrets

from ..proto import tandem_pb2 as pb
from .generation import GenerationRequest


def generate_message(request: GenerationRequest, number: int) -> pb.GenerateRequest:
    """The message for prompt ``number``, without its deadline and its prefill candidates."""
    sampling = pb.Sampling()
    sampling.CopyFrom(request.sampling)
    sampling.max_tokens = request.max_tokens[number]
    sampling.min_tokens = request.text.min_tokens
    if not sampling.HasField("seed"):  # else no other node could continue what one has begun
        sampling.seed = secrets.randbits(63)
    if request.wants_logprobs and not request.text.discard_output:
        sampling.logprobs = request.logprobs or 0
    if request.prompt_alternatives is not None:
        sampling.prompt_logprobs = request.prompt_alternatives
    suffix = f"-{number}" if len(request.prompts) > 1 else ""
    prompt = request.prompts[number]
    return pb.GenerateRequest(
        request_id=request.request_id + suffix,
        prompt=prompt.tokens.tolist(),  # three times as fast as the array
        sampling=sampling,
        priority=request.priority,
        cache_salt=request.cache_salt,
        embed=None if request.embed is None else request.embed.message(prompt),
    )
