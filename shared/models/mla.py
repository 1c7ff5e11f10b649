"""Multi-head latent attention: of a token, one latent is kept for all heads.

T rows, H query heads of this rank, N numbers of a head without position, R rotated ones, V those of
a value, C of a latent.
"""

from __future__ import annotations

import torch

from ...kernels.reference import attention as reference
from ...kernels.reference.latent import latent_attention
from .attention import Angles, LayerKV
from .batch import ForwardBatch
from .linear import ColumnParallel, RowParallel
from .norm import RMSNorm
from .parallel import WeightPlacement, WeightSlot
from .spec import MLASpec


class LatentAttention:
    """This rank's heads of one layer's attention, in two halves: what ends with the latent in the
    cache, and the rest. The latent is computed, and kept, by every rank."""

    def __init__(self, place: WeightPlacement, spec: MLASpec, hidden: int) -> None:
        heads = place.tp.share(spec.num_heads)
        q_part = _part(spec.num_heads, heads, spec.qk_dim)
        kv_part = (spec.kv.dim, range(spec.kv.dim))
        if spec.q_lora_rank is None:
            self.queries = None
            parts = {"q": q_part, "kv_a": kv_part}
        else:
            self.queries = CompressedQueries(place, spec.q_lora_rank, q_part, spec.norm_eps)
            parts = {"q_a": (spec.q_lora_rank, range(spec.q_lora_rank)), "kv_a": kv_part}
        self.down = ColumnParallel(place, hidden, parts, bias=False)
        self.kv_norm = RMSNorm(place, spec.kv_lora_rank, spec.norm_eps)
        self.kv_up = HeadsOfLatent(place, spec, heads)
        values, mine = _part(spec.num_heads, heads, spec.v_dim)
        self.o = RowParallel(place, "o", values, mine, hidden, bias=False)
        self.spec = spec
        self.heads = len(heads)

    def project(
        self, x: torch.Tensor, batch: ForwardBatch, angles: Angles, cache: LayerKV
    ) -> torch.Tensor:
        """Write the rows' latents into the cache; return their queries, [T, H, N + R]."""
        spec, (latents,) = self.spec, cache
        down = self.down(x)
        q, kv = down.split([down.shape[-1] - spec.kv.dim, spec.kv.dim], dim=-1)
        if self.queries is not None:
            q = self.queries(q)
        q_THD = q.view(x.shape[0], self.heads, spec.qk_dim)
        latent, k_rope = kv.split([spec.kv_lora_rank, spec.rope_dim], dim=-1)
        q_rope = q_THD[..., spec.nope_dim :]
        turned = reference.rotary(torch.cat([q_rope, k_rope[:, None]], dim=1), *angles)
        q_rope.copy_(turned[:, :-1])
        kept = torch.cat([self.kv_norm(latent), turned[:, -1]], dim=-1)
        reference.write(latents, batch.slots, kept[:, None])
        return q_THD

    def attend(self, q: torch.Tensor, batch: ForwardBatch, cache: LayerKV) -> torch.Tensor:
        """Attention and the output projection."""
        (latents,) = cache
        k_up, v_up = self.kv_up.halves
        scale = self.spec.softmax_scale
        attended = latent_attention(q, latents, k_up, v_up, batch.contexts, scale)
        return self.o(attended.reshape(q.shape[0], -1))

    def slots(self, prefix: str) -> dict[str, WeightSlot]:
        """The parameters by name, for the loader."""
        return {
            **({} if self.queries is None else self.queries.slots(prefix)),
            **self.down.slots(prefix),
            **self.kv_norm.slots(f"{prefix}.kv_a_norm"),
            **self.kv_up.slots(prefix),
            **self.o.slots(prefix),
        }

    def finish(self) -> None:
        """Called once the parameters are filled."""
        if self.spec.rope_interleaved:
            self._deinterleave()
        if self.queries is not None:
            self.queries.up.finish()
        self.down.finish()
        self.kv_up.finish()
        self.o.finish()

    def _deinterleave(self) -> None:
        """Put what is rotated together half a head apart, as ``rotary`` has it: in queries and keys
        alike, so that their products stay the same."""
        kv = self.spec.kv.dim
        q = self.down.weight[:-kv] if self.queries is None else self.queries.up.weight
        for weight, heads in ((q, self.heads), (self.down.weight[-kv:], 1)):
            pairs = weight.view(heads, -1, weight.shape[-1])[:, -self.spec.rope_dim :]
            pairs.copy_(torch.cat([pairs[:, 0::2], pairs[:, 1::2]], dim=1))


class CompressedQueries:
    """From the compressed query to this rank's heads."""

    def __init__(
        self, place: WeightPlacement, rank: int, part: tuple[int, range], eps: float
    ) -> None:
        self.norm = RMSNorm(place, rank, eps)
        self.up = ColumnParallel(place, rank, {"q_b": part}, bias=False)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(self.norm(x))

    def slots(self, prefix: str) -> dict[str, WeightSlot]:
        """The parameters by name, for the loader."""
        return self.norm.slots(f"{prefix}.q_a_norm") | self.up.slots(prefix)


class HeadsOfLatent:
    """What makes keys and values of this rank's heads out of a latent. It is no product of its own:
    attention multiplies with it on whichever side is cheaper."""

    def __init__(self, place: WeightPlacement, spec: MLASpec, heads: range) -> None:
        self.part = _part(spec.num_heads, heads, spec.nope_dim + spec.v_dim)
        self.weight = place.empty(len(self.part[1]), spec.kv_lora_rank)
        self.shape = (len(heads), spec.nope_dim + spec.v_dim, spec.kv_lora_rank)
        self.nope_dim = spec.nope_dim
        self.dtype = place.activations
        self._halves: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def halves(self) -> tuple[torch.Tensor, torch.Tensor]:
        """For the keys, [H, N, C], and for the values, [H, V, C]; in the type of activations."""
        assert self._halves is not None, "finish() comes first"
        return self._halves

    def slots(self, prefix: str) -> dict[str, WeightSlot]:
        """The parameter by name, for the loader."""
        total, mine = self.part
        shape = (total, self.weight.shape[1])
        return {f"{prefix}.kv_b.weight": WeightSlot(self.weight, shape, 0, mine.start, mine.stop)}

    def finish(self) -> None:
        """Called once the parameter is filled."""
        weight = self.weight.to(self.dtype).view(self.shape)
        self._halves = weight[:, : self.nope_dim], weight[:, self.nope_dim :]
        del self.weight


def _part(total_heads: int, heads: range, width: int) -> tuple[int, range]:
    """Heads of one width as rows of a matrix: how many in all, and which are this rank's."""
    return total_heads * width, range(heads.start * width, heads.stop * width)
