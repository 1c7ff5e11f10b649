"""Two real caches whose layouts differ as much as possible, in the memory of a fake device, and of
a GPU if there is one."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch

from tandem.kernels.fp8 import castable
from tandem.shared.handoff.plane.messages import PeerJoined, Received, SendFinished
from tandem.shared.handoff.wire.head_parts import parts_of
from tandem.shared.kv.cache import KVCache
from tandem.shared.models.spec import AttentionSpec, DecoderSpec, DenseSpec, LayerSpec
from tandem.tests.shared.handoff.support.fake_driver import FakeDevice
from tandem.tests.shared.handoff.support.plane_pair import PlaneRank, until
from tandem.tests.support.layers_ready import layer_ready

HEADS, DIM, LAYERS, END = 4, 6, 2, 99
SPEC = DecoderSpec(
    vocab_size=10,
    hidden_size=8,
    layers=tuple(
        LayerSpec(
            attention=AttentionSpec(num_heads=8, num_kv_heads=HEADS, head_dim=DIM + 4 * layer),
            mlp=DenseSpec(intermediate=8),
        )
        for layer in range(LAYERS)
    ),
    norm_eps=1e-6,
    tie_embeddings=True,
    max_position=1000,
)
FORMATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "fp8": torch.float8_e4m3fn}


class NodeRanks:
    """The ranks of one node, whose blocks lie in some order of their own."""

    def __init__(
        self, stack: ExitStack, name: str, kind: str, tp: int, block: int, **config: Any
    ) -> None:
        self.dtype = FORMATS[kind]
        self.caches = [
            KVCache(SPEC, num_blocks=40, block_size=block, dtype=self.dtype, tp_rank=r, tp_size=tp)
            for r in range(tp)
        ]
        self.heads = [tuple(layer.heads for layer in cache.layout) for cache in self.caches]
        self.table = [(7 * i + tp) % 40 for i in range(-(-END // block))]
        self.slots = [self.table[t // block] * block + t % block for t in range(END)]
        self.ranks = [
            stack.enter_context(
                PlaneRank(
                    name,
                    epoch=ord(name),
                    cache=cache,  # type: ignore[arg-type]
                    rank=number,
                    tp_size=tp,
                    carrier="cuda_ipc",
                    device=FakeDevice(),
                    **config,
                )
            )
            for number, cache in enumerate(self.caches)
        ]

    def layer(self, number: int) -> torch.Tensor:
        """All heads' [K|V][head][token][dim]."""
        sides = [
            torch.stack([side[:, self.slots] for side in c.layers[number]]) for c in self.caches
        ]
        return torch.cat([side.view(torch.uint8) for side in sides], dim=1).view(self.dtype)


@pytest.mark.parametrize(
    ("there", "here"),
    [
        (("bfloat16", 2, 5), ("float32", 1, 4)),
        (("float32", 1, 8), ("bfloat16", 4, 3)),
        (("float32", 4, 4), ("fp8", 2, 16)),
        (("fp8", 1, 7), ("fp8", 2, 5)),
    ],
)
def test_unequal_sides_hand_over_every_value(there: Any, here: Any) -> None:
    torch.manual_seed(1)
    with ExitStack() as stack:
        prefill = NodeRanks(stack, "p", *there)
        decode = NodeRanks(stack, "d", *here, listen_host=None)
        for side in (side for cache in prefill.caches for pair in cache.layers for side in pair):
            side.copy_(torch.randn(side.shape).clamp(-448, 448))
        for part in parts_of(decode.heads, prefill.heads):
            sender, receiver = prefill.ranks[part.sender], decode.ranks[part.receiver]
            span = {"heads": part.heads, "first_token": 0, "end_token": END}
            receiver.expect(sender, 1, decode.table, **span)
            sender.open(receiver, 1, prefill.table, dtype=receiver.cache.kv_dtype, **span)
        for rank in prefill.ranks:
            for layer in range(LAYERS):
                layer_ready(rank.plane, 1, 1, layer, 0, END)
        for ranks, kind in ((prefill.ranks, SendFinished), (decode.ranks, Received)):
            expected = len(parts_of(decode.heads, prefill.heads))
            until(lambda r=ranks, k=kind, n=expected: sum(len(x.log.of(k)) for x in r) == n)  # type: ignore[misc]
        assert {rank.log.wait(PeerJoined).carrier for rank in decode.ranks} == {"cuda_ipc"}
        for layer in range(LAYERS):
            source = castable(prefill.layer(layer), decode.dtype).to(decode.dtype)
            assert torch.equal(source.float(), decode.layer(layer).float())
