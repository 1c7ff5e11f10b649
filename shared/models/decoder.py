"""The decoder: embedding, layers, head."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from ...kernels.operators import CosSin, LayerKV, Linear
from ..errors import StartupError
from .batch import ForwardBatch
from .layers.attention import Attention
from .layers.ffn import DenseMLP
from .layers.mla import LatentAttention
from .layers.moe import MoE
from .layers.norm import RMSNorm
from .layers.rope import Rope
from .parallel import WeightPlacement, WeightSlot
from .spec import (
    AttentionSpec,
    DecoderSpec,
    DenseSpec,
    LayerSpec,
    MLASpec,
    MoESpec,
    NormLayout,
    tensor_parallel_problem,
)

OnLayer = Callable[[int], None]


class VocabParallel:
    """A [vocabulary, hidden] table whose rows are split over ranks: embedding, head, or both."""

    def __init__(self, place: WeightPlacement, vocab: int, hidden: int) -> None:
        self.tp = place.tp
        self.operators = place.operators
        self.activations = place.activations
        self.vocab = vocab
        self.mine = place.tp.shard(vocab)
        # Ranks gather equal shapes, so the last ones' tables are padded with rows of zeros.
        self.weight = place.empty(-(-vocab // place.tp.size), hidden)
        self.weight[len(self.mine) :].zero_()
        self._linear: Linear | None = None

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Look up the rows of tokens."""
        if self.tp.size == 1:
            return F.embedding(tokens, self.weight).to(self.activations)
        local = tokens - self.mine.start
        elsewhere = (local < 0) | (local >= len(self.mine))
        rows = F.embedding(local.masked_fill(elsewhere, 0), self.weight).to(self.activations)
        return self.tp.all_reduce(rows.masked_fill_(elsewhere[:, None], 0))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """[rows, vocabulary] in fp32 on rank 0, nothing on the others."""
        assert self._linear is not None, "finish_loading() comes first"
        parts = self.tp.gather(self._linear(hidden))
        if not parts:
            return None
        full = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        return full[:, : self.vocab].float()

    def weight_slot(self) -> WeightSlot:
        """The parameter, for the loader."""
        target = self.weight[: len(self.mine)]
        return WeightSlot(
            target, (self.vocab, self.weight.shape[1]), 0, self.mine.start, self.mine.stop
        )

    def finish_loading(self, keep_table: bool) -> None:
        """Pack a table that is used as head, once it is loaded. One that also embeds keeps its
        plain rows, because rows cannot be read from the packed copy."""
        self._linear = self.operators.prepare_linear(self.weight, None)
        if not keep_table:
            del self.weight


class Layer:
    """Attention and feed-forward, with norms before each and, in a sandwich, after each."""

    def __init__(self, place: WeightPlacement, spec: LayerSpec, hidden: int, eps: float) -> None:
        self.attention_norm = RMSNorm(place, hidden, eps)
        self.attention = _attention(place, spec.attention, hidden, eps)
        self.mlp_norm = RMSNorm(place, hidden, eps)
        self.mlp = _feed_forward(place, spec.mlp, hidden)
        sandwich = spec.norms is NormLayout.SANDWICH
        self.post_attention_norm = RMSNorm(place, hidden, eps) if sandwich else None
        self.post_mlp_norm = RMSNorm(place, hidden, eps) if sandwich else None

    def write_kv(
        self, x: torch.Tensor, batch: ForwardBatch, cos_sin: CosSin, cache: LayerKV
    ) -> torch.Tensor:
        """Write the rows' KV to the cache; return their queries."""
        return self.attention.project(self.attention_norm(x), batch, cos_sin, cache)

    def complete(
        self, x: torch.Tensor, q: torch.Tensor, batch: ForwardBatch, cache: LayerKV
    ) -> torch.Tensor:
        """Attention and feed-forward."""
        attended = self.attention.attend(q, batch, cache)
        if self.post_attention_norm is not None:
            attended = self.post_attention_norm(attended)
        normed, x = self.mlp_norm.add(attended, x)
        out = self.mlp(normed)
        return x + (out if self.post_mlp_norm is None else self.post_mlp_norm(out))

    def weight_slots(self, prefix: str) -> dict[str, WeightSlot]:
        """The parameters by name, for the loader."""
        slots = {
            **self.attention_norm.weight_slots(f"{prefix}.attention_norm"),
            **self.attention.weight_slots(f"{prefix}.attention"),
            **self.mlp_norm.weight_slots(f"{prefix}.mlp_norm"),
            **self.mlp.weight_slots(f"{prefix}.mlp"),
        }
        if self.post_attention_norm is not None:
            slots |= self.post_attention_norm.weight_slots(f"{prefix}.post_attention_norm")
        if self.post_mlp_norm is not None:
            slots |= self.post_mlp_norm.weight_slots(f"{prefix}.post_mlp_norm")
        return slots


def _attention(
    place: WeightPlacement, spec: AttentionSpec | MLASpec, hidden: int, eps: float
) -> Attention | LatentAttention:
    match spec:
        case AttentionSpec():
            return Attention(place, spec, hidden, eps)
        case MLASpec():
            return LatentAttention(place, spec, hidden)


def _feed_forward(place: WeightPlacement, spec: DenseSpec | MoESpec, hidden: int) -> DenseMLP | MoE:
    match spec:
        case DenseSpec():
            return DenseMLP(place, spec, hidden)
        case MoESpec():
            return MoE(place, spec, hidden)


class Decoder:
    """A rank's part of the model. Its parameters are undefined until the loader has filled
    ``weight_slots()`` and called ``finish_loading()``."""

    def __init__(self, spec: DecoderSpec, place: WeightPlacement) -> None:
        problem = tensor_parallel_problem(spec, place.tp.size)
        if problem is not None:
            raise StartupError(f"tensor parallelism over {place.tp.size} ranks: {problem}")
        self.spec = spec
        self.place = place
        self.embed = VocabParallel(place, spec.vocab_size, spec.hidden_size)
        self.layers = [Layer(place, s, spec.hidden_size, spec.norm_eps) for s in spec.layers]
        self.norm = RMSNorm(place, spec.hidden_size, spec.norm_eps)
        self.head = (
            self.embed
            if spec.tie_embeddings
            else VocabParallel(place, spec.vocab_size, spec.hidden_size)
        )
        self.ropes = {layer.rope: Rope(layer.rope, place.device) for layer in spec.layers}
        # Rounded as the embeddings are.
        self.embedding_scale = torch.tensor(spec.embedding_scale, dtype=place.dtype).item()

    def forward(
        self, batch: ForwardBatch, cache: Sequence[LayerKV], on_layer: OnLayer | None = None
    ) -> torch.Tensor:
        """Return the normalised hidden state of ``batch.output_rows``.

        ``on_layer(i)`` is called as soon as the step's KV of layer i is in the cache.
        """
        x = self.embed.embed(batch.tokens)
        if self.embedding_scale != 1.0:
            x = x * self.embedding_scale
        cos_sin = {spec: rope.cos_sin(batch.positions) for spec, rope in self.ropes.items()}
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            q = layer.write_kv(x, batch, cos_sin[self.spec.layers[index].rope], cache[index])
            if on_layer is not None:
                on_layer(index)
            if index == last and not batch.needs_logits:
                break
            x = layer.complete(x, q, batch, cache[index])
        return self.norm(x.index_select(0, batch.output_rows))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """[rows, vocabulary] in fp32 on rank 0, nothing on the others."""
        logits, cap = self.head.logits(hidden), self.spec.logit_soft_cap
        return logits if logits is None or cap is None else torch.tanh(logits / cap) * cap

    def prepare_batched_decode(self, cache: Sequence[LayerKV], block_size: int) -> bool:
        """Compile the kernels that attend for all decoding rows at once. Return whether every layer
        has one; latent attention does without."""
        configs = {
            layer.attention.config(layer_kv, block_size)
            for layer, layer_kv in zip(self.layers, cache, strict=True)
            if isinstance(layer.attention, Attention)
        }
        prepare = self.place.operators.prepare_batched_decode
        return bool(configs) and all(prepare(config) for config in configs)

    def weight_slots(self) -> dict[str, WeightSlot]:
        """Every parameter of this rank by name, for the loader."""
        slots = {"embed.weight": self.embed.weight_slot(), **self.norm.weight_slots("norm")}
        if self.head is not self.embed:
            slots["head.weight"] = self.head.weight_slot()
        for index, layer in enumerate(self.layers):
            slots |= layer.weight_slots(f"layers.{index}")
        return slots

    def finish_loading(self) -> None:
        """Pack the weights, once they are loaded."""
        for layer in self.layers:
            layer.attention.finish_loading()
            layer.mlp.finish_loading()
        self.head.finish_loading(keep_table=self.head is self.embed)
