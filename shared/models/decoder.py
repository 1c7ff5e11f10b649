"""The decoder: embedding, layers, head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from ...kernels.signatures import CosSin, LayerKV
from ..errors import StartupError
from .batch import ForwardBatch
from .layers.attention import Attention
from .layers.ffn import DenseMLP
from .layers.linear_method import LinearPart, choose_table
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


class LoadedPart(Protocol):
    """A part of the decoder that is loaded at once."""

    def weight_slots(self) -> dict[str, WeightSlot]:
        """The parameters by name, for the loader."""

    def finish_loading(self) -> None:
        """Pack the weights, once they are loaded."""


class VocabParallel:
    """A [vocabulary, hidden] table whose rows are split over ranks: embedding, head, or both."""

    def __init__(
        self, place: WeightPlacement, vocab: int, hidden: int, *, embeds: bool, is_head: bool
    ) -> None:
        self.tp = place.tp
        self.vocab = vocab
        self.embeds = embeds
        self.is_head = is_head
        self.mine = place.tp.shard(vocab)
        # Ranks gather equal shapes, so the last ones' tables are padded with rows of zeros.
        padding = -(-vocab // place.tp.size) - len(self.mine)
        part = LinearPart(
            place.name("weight"), (vocab, self.mine), (hidden, range(hidden)), padding
        )
        self.method = choose_table(place, part)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Look up the rows of tokens."""
        if self.tp.size == 1:
            return self.method.rows(tokens)
        local = tokens - self.mine.start
        elsewhere = (local < 0) | (local >= len(self.mine))
        rows = self.method.rows(local.masked_fill(elsewhere, 0))
        return self.tp.all_reduce(rows.masked_fill_(elsewhere[:, None], 0))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """[rows, vocabulary] in fp32 on rank 0, nothing on the others."""
        parts = self.tp.gather(self.method(hidden))
        if not parts:
            return None
        full = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        return full[:, : self.vocab].float()

    def weight_slots(self) -> dict[str, WeightSlot]:
        """The parameter, for the loader."""
        return self.method.weight_slots()

    def finish_loading(self) -> None:
        """Pack a table that is used as head, once it is loaded. One that also embeds keeps its
        rows, because rows cannot be read from the packed copy."""
        if self.is_head:
            self.method.finish_loading(None, keep_rows=self.embeds)


class Layer:
    """Attention and feed-forward, with norms before each and, in a sandwich, after each."""

    def __init__(self, place: WeightPlacement, spec: LayerSpec, hidden: int, eps: float) -> None:
        def norm(name: str) -> RMSNorm:
            return RMSNorm(place.at(name), hidden, eps)

        self.attention_norm = norm("attention_norm")
        self.attention = _attention(place.at("attention"), spec.attention, hidden, eps)
        self.mlp_norm = norm("mlp_norm")
        self.mlp = _feed_forward(place.at("mlp"), spec.mlp, hidden)
        sandwich = spec.norms is NormLayout.SANDWICH
        self.post_attention_norm = norm("post_attention_norm") if sandwich else None
        self.post_mlp_norm = norm("post_mlp_norm") if sandwich else None

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

    def weight_slots(self) -> dict[str, WeightSlot]:
        """The parameters by name, for the loader."""
        norms = (
            self.attention_norm,
            self.mlp_norm,
            self.post_attention_norm,
            self.post_mlp_norm,
        )
        slots = self.attention.weight_slots() | self.mlp.weight_slots()
        for norm in norms:
            slots |= {} if norm is None else norm.weight_slots()
        return slots

    def finish_loading(self) -> None:
        """Pack the weights, once they are loaded."""
        self.attention.finish_loading()
        self.mlp.finish_loading()


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
    """A rank's part of the model.

    Each part is handed to ``load`` as soon as it is allocated, which fills its ``weight_slots()``
    and calls ``finish_loading()`` before the next one is: at most one part is in memory both
    as it was loaded and as it is packed.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        place: WeightPlacement,
        load: Callable[[LoadedPart], None],
        *,
        has_head: bool = True,
    ) -> None:
        """``has_head`` is false for a checkpoint that only embeds."""
        problem = tensor_parallel_problem(spec, place.tp.size)
        if problem is not None:
            raise StartupError(f"tensor parallelism over {place.tp.size} ranks: {problem}")
        self.spec = spec
        self.place = place
        tied = spec.tie_embeddings
        self.embed = self._table("embed", load, embeds=True, is_head=tied)
        self.layers = [self._layer(index, load) for index in range(len(spec.layers))]
        self.norm = RMSNorm(place.at("norm"), spec.hidden_size, spec.norm_eps)
        load(self.norm)
        self.head: VocabParallel | None = self.embed if tied else None
        if has_head and not tied:
            self.head = self._table("head", load, embeds=False, is_head=True)
        self.ropes = {layer.rope: Rope(layer.rope, place.device) for layer in spec.layers}
        # Rounded as the embeddings are.
        self.embedding_scale = torch.tensor(spec.embedding_scale, dtype=place.dtype).item()

    def _table(
        self, name: str, load: Callable[[LoadedPart], None], *, embeds: bool, is_head: bool
    ) -> VocabParallel:
        vocab, hidden = self.spec.vocab_size, self.spec.hidden_size
        table = VocabParallel(self.place.at(name), vocab, hidden, embeds=embeds, is_head=is_head)
        load(table)
        return table

    def _layer(self, index: int, load: Callable[[LoadedPart], None]) -> Layer:
        spec = self.spec
        place = self.place.at(f"layers.{index}")
        layer = Layer(place, spec.layers[index], spec.hidden_size, spec.norm_eps)
        load(layer)
        return layer

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
        assert self.head is not None, "the node refuses what needs logits"
        logits, cap = self.head.logits(hidden), self.spec.logit_soft_cap
        return logits if logits is None or cap is None else torch.tanh(logits / cap) * cap

    def prepare_batched_decode(self, cache: Sequence[LayerKV], block_size: int) -> bool:
        """Compile the kernels that attend for all decoding rows at once. Return whether any layer
        has one: each uses its own, and latent attention does without."""
        attentions = [
            (layer.attention, layer.attention.config(layer_kv, block_size))
            for layer, layer_kv in zip(self.layers, cache, strict=True)
            if isinstance(layer.attention, Attention)
        ]
        prepare = self.place.operators.prepare_batched_decode
        works = {config: prepare(config) for config in dict.fromkeys(c for _, c in attentions)}
        for attention, config in attentions:
            attention.batched_decode = works[config]
        return any(works.values())
