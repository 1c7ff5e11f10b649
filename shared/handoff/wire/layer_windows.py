"""The part of a prompt's KV that a decode node needs, layer by layer.

In a layer with a window of W tokens, the token at position p attends to itself and the W - 1 tokens
before it, so to continue at p, a node needs only the newest W - 1 tokens of that layer. Both heads
compute this from the model's spec.
"""

from __future__ import annotations

from ...models.spec import DecoderSpec


def first_tokens(
    spec: DecoderSpec, first_token: int, end_token: int, resume_at: int
) -> tuple[int, ...]:
    """The first token of each layer's part of [first_token, end_token), for a node that computes
    from ``resume_at`` on.

    Every layer has at least one token, so that every transfer has a frame.
    """
    latest = end_token - 1
    windows = (kv.window for kv in spec.memories)
    return tuple(
        first_token if window is None else max(first_token, min(resume_at - window + 1, latest))
        for window in windows
    )
