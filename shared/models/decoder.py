"""The decoder: embedding, layers, head."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import NamedTuple

import torch
import torch.nn.functional as F

from ...kernels.attention_metadata import AttentionConfig, LatentConfig
from ...kernels.reference.activation import activate
from ...kernels.signatures import (
    CosSin,
    DecodingLayers,
    FeedForward,
    LayerKV,
    LayerParts,
    Memories,
    OutputHead,
    Queries,
)
from ..errors import StartupError
from .batch import ForwardBatch
from .layers.attention import Attention
from .layers.ffn import DenseMLP
from .layers.mla import LatentAttention
from .layers.moe import MoE, NormedMoE
from .layers.norm import Norm, RMSNorm, make_norm
from .layers.part import Part
from .layers.position_bias import ScoreBias
from .layers.residual import Residual
from .layers.rope import Rope
from .layers.token_inputs import OutputScale, TokenEmbedding, TokenGate
from .layers.vocabulary import VocabParallel
from .parallel import WeightPlacement, WeightSlot, replicated_slot
from .spec import (
    AttentionSpec,
    ClassifierSpec,
    DecoderSpec,
    DenseSpec,
    LayerSpec,
    MLASpec,
    MoESpec,
    NormLayout,
    PositionTable,
    ProjectionSpec,
    TokenScoreSpec,
    tensor_parallel_problem,
)

OnLayer = Callable[[int], None]


class PositionEmbedding(Part):
    """A learned position embedding, replicated on every rank."""

    def __init__(self, place: WeightPlacement, table: PositionTable, hidden: int) -> None:
        self.weight = place.empty(table.rows, hidden)
        self.name = place.name("weight")
        self.offset = table.offset
        self.activations = place.activations

    def __call__(self, positions: torch.Tensor) -> torch.Tensor:
        return F.embedding(positions + self.offset, self.weight).to(self.activations)

    def own_slots(self) -> dict[str, WeightSlot]:
        return {self.name: replicated_slot(self.weight)}


class Segments(Part):
    """An embedding of the segment that a token belongs to."""

    def __init__(self, place: WeightPlacement, rows: int, hidden: int) -> None:
        self.weight = place.empty(rows, hidden)
        self.name = place.name("weight")
        self.activations = place.activations

    def __call__(self, segments: torch.Tensor | None) -> torch.Tensor:
        """[T, hidden], or [hidden] if all tokens belong to the first segment."""
        rows = self.weight[0] if segments is None else F.embedding(segments, self.weight)
        return rows.to(self.activations)

    def own_slots(self) -> dict[str, WeightSlot]:
        return {self.name: replicated_slot(self.weight)}


class Projection(Part):
    """A linear layer over a text's vector, replicated on every rank."""

    def __init__(self, place: WeightPlacement, spec: ProjectionSpec) -> None:
        self.weight = place.empty(spec.outputs, spec.inputs)
        self.name = place.name("weight")

    def __call__(self, vectors: torch.Tensor) -> torch.Tensor:
        return F.linear(vectors, self.weight.to(vectors.dtype))

    def own_slots(self) -> dict[str, WeightSlot]:
        return {self.name: replicated_slot(self.weight)}


class Classifier(Part):
    """The head that scores or labels texts, replicated on every rank. It is small and computes in
    float32, since scores are compared."""

    def __init__(self, place: WeightPlacement, spec: ClassifierSpec, model: DecoderSpec) -> None:
        hidden, self.layer, self.eps = model.hidden_size, spec.layer, model.norm_eps
        self.weights = {"out.weight": place.empty(len(spec.labels), hidden)}
        if spec.bias:
            self.weights["out.bias"] = place.empty(len(spec.labels))
        if spec.layer is not None:
            self.weights["dense.weight"] = place.empty(hidden, hidden)
            if spec.layer.bias:
                self.weights["dense.bias"] = place.empty(hidden)
            if spec.layer.normed:
                self.weights["norm.weight"] = place.empty(hidden)
        self.slots = {
            place.name(name): replicated_slot(each) for name, each in self.weights.items()
        }

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """The logits [rows, labels] of pooled hidden states [rows, hidden]."""
        x = hidden.float()
        if self.layer is not None:
            x = self._linear("dense", x)
            kind = self.layer.activation
            x = x.tanh() if kind == "tanh" else activate(x, kind)
            if self.layer.normed:
                x = F.layer_norm(x, x.shape[-1:], self.weights["norm.weight"].float(), eps=self.eps)
        return self._linear("out", x)

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        bias = self.weights.get(f"{name}.bias")
        weight = self.weights[f"{name}.weight"].float()
        return F.linear(x, weight, None if bias is None else bias.float())

    def own_slots(self) -> dict[str, WeightSlot]:
        return self.slots


class Layer(Part):
    """Attention and feed-forward, with the norms of their layout."""

    def __init__(self, place: WeightPlacement, spec: LayerSpec, model: DecoderSpec) -> None:
        layout, hidden, kind, eps = spec.norms, model.hidden_size, model.norm, model.norm_eps

        def norm(name: str, *layouts: NormLayout) -> Norm | None:
            return make_norm(place.at(name), kind, hidden, eps) if layout in layouts else None

        before = (NormLayout.PRE, NormLayout.SANDWICH, NormLayout.PARALLEL)
        after = (NormLayout.POST, NormLayout.SANDWICH, NormLayout.RESIDUAL)
        self.attention_norm = norm("attention_norm", *before, NormLayout.PARALLEL_SHARED)
        self.attention = _attention(place.at("attention"), spec.attention, hidden, eps)
        self.mlp_norm = norm("mlp_norm", *before, NormLayout.PRE_MLP)
        self.mlp = _feed_forward(place.at("mlp"), spec.mlp, hidden, eps)
        self.post_attention_norm = norm("post_attention_norm", *after)
        self.post_mlp_norm = norm("post_mlp_norm", *after)
        self.parallel = layout in (NormLayout.PARALLEL, NormLayout.PARALLEL_SHARED)
        # Norms over the sums with the input.
        self.residual_norms = layout is NormLayout.RESIDUAL
        self.residual_scale = spec.residual_scale
        inputs = model.token_inputs
        self.token_gate = (
            None if inputs is None else TokenGate(place.at("token_gate"), inputs, hidden, eps)
        )
        self.output_scale = OutputScale(place.at("output_scale")) if spec.output_scale else None
        self.place = place
        # Fused operators for both halves of a plain layer, after loading.
        self._queries: Queries | None = None
        self._feed_forward: FeedForward | None = None
        # Both fused operators, if the layer consists of nothing else.
        self.parts: LayerParts | None = None

    def pack(self) -> None:
        """Prepare fused operators."""
        operators, attention, mlp = self.place.operators, self.attention, self.mlp
        if not isinstance(attention, Attention):
            return
        norm = self.attention_norm
        if isinstance(norm, RMSNorm) and attention.only_rotates:
            head = None if attention.head_norm is None else attention.head_norm.weight
            runs = attention.qkv.method.runs()
            self._queries = operators.prepare_queries(
                norm.weight, norm.eps, runs, head, attention.eps
            )
        norm = self.mlp_norm
        if (
            self.place.tp.size == 1
            and isinstance(norm, RMSNorm)
            and self.post_attention_norm is None
            and not self.parallel
            and self.post_mlp_norm is None
            and self.residual_scale == 1.0
            and attention.o.bias is None
        ):
            o = attention.o.method.runs()
            if isinstance(mlp, MoE):
                self._feed_forward = mlp.prepare(o, norm)
            elif isinstance(mlp, DenseMLP) and mlp.spec.gated and mlp.down.bias is None:
                up, down = mlp.up.method.runs(), mlp.down.method.runs()
                self._feed_forward = operators.prepare_feed_forward(
                    o, norm.weight, norm.eps, up, down, mlp.spec.activation
                )
        extra = self.token_gate, self.output_scale
        if self._queries and self._feed_forward and extra == (None, None):
            sinks = None if attention.sinks is None else attention.sinks.scores
            self.parts = LayerParts(self._queries, self._feed_forward, attention.params, sinks)

    def write_kv(
        self, x: Residual, batch: ForwardBatch, cos_sin: CosSin, memories: Memories
    ) -> torch.Tensor:
        """Write the rows' KV to the layer's caches; return their queries."""
        if self._queries is not None:
            (kv,) = memories
            return self._queries(x.sum(), cos_sin, kv, batch.attention.slots)
        hidden = x.sum() if self.attention_norm is None else x.normed(self.attention_norm)
        return self.attention.project(hidden, batch, cos_sin, memories)

    def complete(
        self,
        x: Residual,
        q: torch.Tensor,
        batch: ForwardBatch,
        memories: Memories,
        token_input: torch.Tensor | None,
    ) -> None:
        """Add attention, feed-forward, and the layer's token inputs."""
        self._add_halves(x, q, batch, memories)
        if self.token_gate is not None:
            assert token_input is not None
            x.add(self.token_gate(x.sum(), token_input))
        if self.output_scale is not None:
            x.replace(x.sum() * self.output_scale.weight)

    def _add_halves(
        self, x: Residual, q: torch.Tensor, batch: ForwardBatch, memories: Memories
    ) -> None:
        if self._feed_forward is not None:
            assert isinstance(self.attention, Attention)
            attended = self.attention.attend_heads(q, batch, memories)
            x.replace(self._feed_forward(attended, x.sum()))
            return
        attention_out = self.attention.attend(q, batch, memories)
        if self.parallel:
            norm = self.mlp_norm or self.attention_norm
            assert norm is not None and not isinstance(self.mlp, NormedMoE)
            x.add(self._scale_residual(attention_out + self.mlp(x.normed(norm))))
            return
        if self.residual_norms:
            assert self.post_attention_norm is not None and self.post_mlp_norm is not None
            assert not isinstance(self.mlp, NormedMoE)
            x.add(attention_out)
            x.replace(x.normed(self.post_attention_norm))
            x.add(self.mlp(x.sum()))
            x.replace(x.normed(self.post_mlp_norm))
            return
        if self.post_attention_norm is not None:
            attention_out = self.post_attention_norm(attention_out)
        x.add(self._scale_residual(attention_out))
        mlp_input = x.sum() if self.mlp_norm is None else x.normed(self.mlp_norm)
        if isinstance(self.mlp, NormedMoE):
            out = self.mlp(mlp_input, x.sum())
        else:
            out = self.mlp(mlp_input)
        if self.post_mlp_norm is not None:
            out = self.post_mlp_norm(out)
        x.add(self._scale_residual(out))

    def _scale_residual(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.residual_scale == 1.0 else x * self.residual_scale


def _attention(
    place: WeightPlacement, spec: AttentionSpec | MLASpec, hidden: int, eps: float
) -> Attention | LatentAttention:
    match spec:
        case AttentionSpec():
            return Attention(place, spec, hidden, eps)
        case MLASpec():
            return LatentAttention(place, spec, hidden)


def _feed_forward(
    place: WeightPlacement, spec: DenseSpec | MoESpec, hidden: int, eps: float
) -> DenseMLP | MoE | NormedMoE:
    match spec:
        case DenseSpec():
            return DenseMLP(place, spec, hidden)
        case MoESpec(shared_norms=True):
            return NormedMoE(place, spec, hidden, eps)
        case MoESpec():
            return MoE(place, spec, hidden, eps)


class LayerRun(NamedTuple):
    """Consecutive layers that decode in one fused operator, or a single layer without one."""

    indices: range
    memories: slice
    rope: Rope
    decode: DecodingLayers | None


class Decoder:
    """A rank's part of the model.

    Each part is passed to ``load`` as soon as it is allocated, which fills its ``weight_slots()``
    and calls ``finish_loading()`` before the next part is allocated: at most one part is in memory
    both unpacked and packed.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        place: WeightPlacement,
        load: Callable[[Part], None],
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
        self.positions: PositionEmbedding | None = None
        if spec.positions is not None:
            self.positions = PositionEmbedding(
                place.at("positions"), spec.positions, spec.hidden_size
            )
            load(self.positions)
        self.position_bias: ScoreBias | None = None
        if spec.position_bias is not None:
            self.position_bias = ScoreBias(place.at("position_bias"), spec.position_bias)
            load(self.position_bias)
        self.segments: Segments | None = None
        if spec.segments:
            self.segments = Segments(place.at("segments"), spec.segments, spec.hidden_size)
            load(self.segments)
        self.embedding_norm: Norm | None = None
        if spec.embedding_norm:
            self.embedding_norm = make_norm(
                place.at("embedding_norm"), spec.norm, spec.hidden_size, spec.norm_eps
            )
            load(self.embedding_norm)
        self.token_inputs: TokenEmbedding | None = None
        if spec.token_inputs is not None:
            self.token_inputs = TokenEmbedding(place.at("token_inputs"), spec)
            load(self.token_inputs)
        self.layers = [self._layer(index, load) for index in range(len(spec.layers))]
        self.norm: Norm | None = None
        if spec.layers[-1].norms is not NormLayout.RESIDUAL:
            self.norm = make_norm(place.at("norm"), spec.norm, spec.hidden_size, spec.norm_eps)
            load(self.norm)
        self.projections: list[Projection] = []
        for index, projection in enumerate(spec.projections):
            self.projections.append(Projection(place.at(f"projections.{index}"), projection))
            load(self.projections[-1])
        self.classifier: Classifier | None = None
        if isinstance(spec.classifier, ClassifierSpec):
            self.classifier = Classifier(place.at("classifier"), spec.classifier, spec)
            load(self.classifier)
        self.head: VocabParallel | None = self.embed if tied else None
        if has_head and spec.has_head and not tied:
            self.head = self._table("head", load, embeds=False, is_head=True)
        self._memories = spec.memories_of_layer
        # The last layer that writes to the cache.
        self._last_writing_layer = max(
            index for index, layer in enumerate(spec.layers) if layer.attention.memories
        )
        # On a GPU, launches for a few rows take longer than looking them up.
        known = 0 if place.device.type == "cpu" else spec.max_position
        self.ropes = {
            rope: Rope(rope, place.device, known)
            for rope in dict.fromkeys(layer.rope for layer in spec.layers)
        }
        self._runs = self._layer_runs()
        self._logits_run = self._run_to_logits()
        # Rounded like the embeddings.
        self.embedding_scale = torch.tensor(spec.embedding_scale, dtype=place.dtype).item()

    def _table(
        self, name: str, load: Callable[[Part], None], *, embeds: bool, is_head: bool
    ) -> VocabParallel:
        vocab, hidden = self.spec.vocab_size, self.spec.hidden_size
        bias = is_head and self.spec.head_bias
        table = VocabParallel(
            self.place.at(name), vocab, hidden, embeds=embeds, is_head=is_head, bias=bias
        )
        load(table)
        return table

    def _layer(self, index: int, load: Callable[[Part], None]) -> Layer:
        spec = self.spec
        place = self.place.at(f"layers.{index}")
        layer = Layer(place, spec.layers[index], spec)
        load(layer)
        return layer

    def _layer_runs(self) -> list[LayerRun]:
        def alike(index: int) -> object:
            spec, attention = self.spec.layers[index], self.layers[index].attention
            if self.layers[index].parts is None or not isinstance(attention, Attention):
                return index
            sizes = attention.heads, attention.kv_heads, attention.dim
            experts = isinstance(spec.mlp, MoESpec)
            return spec.rope, sizes, attention.head_norm is None, attention.sinks is None, experts

        runs = []
        for _, group in groupby(range(len(self.layers)), alike):
            indices = list(group)
            parts = [parts for index in indices if (parts := self.layers[index].parts) is not None]
            decode = self.place.operators.prepare_decoding(parts) if parts else None
            first, last = indices[0], indices[-1]
            memories = slice(self._memories[first].start, self._memories[last].stop)
            rope = self.ropes[self.spec.layers[first].rope]
            runs.append(LayerRun(range(first, last + 1), memories, rope, decode))
        return runs

    def _run_to_logits(self) -> LayerRun | None:
        """All layers, if one fused operator computes them and the head."""
        run, *more = self._runs
        head, norm = self.head, self.norm
        if run.decode is None or more or head is None or head.tp.size > 1:
            return None
        if self.position_bias is not None or not isinstance(norm, RMSNorm):
            return None
        parts = [layer.parts for layer in self.layers if layer.parts is not None]
        output = OutputHead(norm.weight, norm.eps, head.method.runs())
        decode = self.place.operators.prepare_decoding(parts, output)
        return None if decode is None else run._replace(decode=decode)

    def decode(
        self, batch: ForwardBatch, cache: Sequence[LayerKV], on_layer: OnLayer | None = None
    ) -> torch.Tensor | None:
        """The logits of all rows, as ``logits(forward(...))``, if all rows decode and one fused
        operator computes them. Otherwise returns ``None`` and writes nothing."""
        run = self._logits_run
        if run is None or batch.output_rows is not None or not _all_decode(batch):
            return None
        assert batch.attention.decodes is not None
        end = batch.attention.decodes.max_seq_len
        cos_sin = run.rope.cos_sin_below(batch.positions, end)
        x = Residual(self._embed_tokens(batch))
        logits = self._decode(run, x, batch, cos_sin, cache, on_layer)
        return None if logits is None else self._scale_logits(logits)

    def forward(
        self, batch: ForwardBatch, cache: Sequence[LayerKV], on_layer: OnLayer | None = None
    ) -> torch.Tensor:
        """Return the normalised hidden state of ``batch.output_rows``.

        ``on_layer(i)`` is called as soon as the step's KV of memory i is in the cache.
        """
        if self.position_bias is not None:
            batch = batch._replace(biases=self.position_bias(batch.attention.sequences))
        x = self._through_layers(self._embed_tokens(batch), batch, cache, on_layer)
        if batch.output_rows is not None:
            x.replace(x.sum().index_select(0, batch.output_rows))
        return x.sum() if self.norm is None else x.normed(self.norm)

    def _embed_tokens(self, batch: ForwardBatch) -> torch.Tensor:
        x = self.embed.embed(batch.tokens)
        if self.embedding_scale != 1.0:
            x = x * self.embedding_scale
        if self.positions is not None:
            x = x + self.positions(batch.positions)
        if self.segments is not None:
            x = x + self.segments(batch.segments)
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
        return x

    def _through_layers(
        self,
        embedded: torch.Tensor,
        batch: ForwardBatch,
        cache: Sequence[LayerKV],
        on_layer: OnLayer | None,
    ) -> Residual:
        """The last layer's output, or unless the batch ``needs_logits``, the input of the last
        layer that writes to the cache."""
        x = Residual(embedded)
        inputs = None if self.token_inputs is None else self.token_inputs(batch.tokens, embedded)
        cos_sin = {rope: rope.cos_sin(batch.positions) for rope in self.ropes.values()}
        all_decode = _all_decode(batch)
        for run in self._runs:
            rotation = cos_sin[run.rope]
            out = self._decode(run, x, batch, rotation, cache, on_layer) if all_decode else None
            if out is not None:
                x.replace(out)
                continue
            for index in run.indices:
                layer, memories = self.layers[index], cache[self._memories[index]]
                q = layer.write_kv(x, batch, rotation, memories)
                self._announce(index, on_layer)
                if index == self._last_writing_layer and not batch.needs_logits:
                    return x
                token_input = None if inputs is None else inputs[:, index]
                layer.complete(x, q, batch, memories, token_input)
        return x

    def _decode(
        self,
        run: LayerRun,
        x: Residual,
        batch: ForwardBatch,
        cos_sin: CosSin,
        cache: Sequence[LayerKV],
        on_layer: OnLayer | None,
    ) -> torch.Tensor | None:
        """The output of a run of which all rows decode, by its fused operator. Without one, returns
        ``None`` and writes nothing, and its layers are computed one by one."""
        decodes = batch.attention.decodes
        if run.decode is None or decodes is None:
            return None
        out = run.decode(x.sum(), cos_sin, cache[run.memories], batch.attention.slots, decodes)
        if out is not None and on_layer is not None:
            for index in run.indices:
                self._announce(index, on_layer)
        return out

    def _announce(self, index: int, on_layer: OnLayer | None) -> None:
        if on_layer is not None and self.spec.layers[index].attention.memories:
            memories = self._memories[index]
            for memory in range(memories.start, memories.stop):
                on_layer(memory)

    def announce_all(self, on_layer: OnLayer | None) -> None:
        """Announce the KV of all layers, after a graph that computes them at once."""
        for index in range(len(self.layers)):
            self._announce(index, on_layer)

    def project_vectors(self, vectors: torch.Tensor) -> torch.Tensor:
        """Apply the projections to sums of hidden states, in fp32."""
        vectors = vectors.float()
        for projection in self.projections:
            vectors = projection(vectors)
        return vectors

    def scores(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """The classifier's logits [rows, labels] in fp32, or the score by the logits of one or two
        tokens, on rank 0 only."""
        spec = self.spec.classifier
        if not isinstance(spec, TokenScoreSpec):
            assert self.classifier is not None, "the node rejects requests that need a classifier"
            return self.classifier(hidden)
        logits = self.logits(hidden)
        if logits is None:
            return None
        score = logits[:, spec.true]
        return (score if spec.false is None else score - logits[:, spec.false])[:, None]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """[rows, vocabulary] in fp32 on rank 0, ``None`` on the others."""
        assert self.head is not None, "the node rejects requests that need logits"
        logits = self.head.logits(hidden)
        if logits is None:
            return None
        return self._scale_logits(logits)

    def _scale_logits(self, logits: torch.Tensor) -> torch.Tensor:
        if self.spec.logit_scale != 1.0:
            logits = logits * self.spec.logit_scale
        cap = self.spec.logit_soft_cap
        return logits if cap is None else torch.tanh(logits / cap) * cap

    @property
    def attends_one_by_one(self) -> bool:
        """True if a layer attends to each sequence by itself."""
        return self.position_bias is not None or not all(
            layer.attention.batched_decode for layer in self.layers
        )

    @property
    def waits_for_device(self) -> bool:
        """True if a step waits for the device between layers, for the rows of each expert."""
        mlps = (layer.mlp for layer in self.layers)
        return any(mlp.experts.operator.waits for mlp in mlps if isinstance(mlp, MoE | NormedMoE))

    def prepare_ropes(self, cache: Sequence[LayerKV]) -> None:
        """Compile the kernels that rotate heads and write them to the cache."""
        for layer, spec, memories in zip(
            self.layers, self.spec.layers, self._memories, strict=True
        ):
            if isinstance(layer.attention, Attention):
                rotated = 0 if spec.rope is None else spec.rope.dim
                layer.attention.prepare_rope(cache[memories], rotated)

    def prepare_batched_decode(self, cache: Sequence[LayerKV], block_size: int) -> bool:
        """Compile the kernels that attend for all decoding rows at once. Returns whether any layer
        has one."""
        operators = self.place.operators

        @functools.cache
        def prepared(config: AttentionConfig | LatentConfig) -> bool:
            if isinstance(config, LatentConfig):
                return operators.prepare_latent_decode(config)
            return operators.prepare_batched_decode(config)

        attentions = [layer.attention for layer in self.layers]
        for attention, memories in zip(attentions, self._memories, strict=True):
            attention.batched_decode = prepared(attention.config(cache[memories], block_size))
        return any(attention.batched_decode for attention in attentions)

    def prepare_batched_chunks(self, cache: Sequence[LayerKV], block_size: int) -> None:
        """Compile the kernels that attend for all chunks at once."""
        operators = self.place.operators

        @functools.cache
        def prepared(config: AttentionConfig | LatentConfig) -> bool:
            if isinstance(config, LatentConfig):
                return operators.prepare_latent_chunks(config)
            return operators.prepare_batched_chunks(config)

        for layer, memories in zip(self.layers, self._memories, strict=True):
            attention = layer.attention
            attention.batched_chunks = prepared(attention.config(cache[memories], block_size))

    @property
    def chunks_in_place(self) -> bool:
        """True if attention of chunks allocates no memory for their contexts, once prepared."""
        batched = all(layer.attention.batched_chunks for layer in self.layers)
        return batched and self.place.operators.chunks_in_place


def _all_decode(batch: ForwardBatch) -> bool:
    """Return whether each row is the only one of its sequence."""
    decodes = batch.attention.decodes
    if decodes is None or len(decodes.rows) < len(batch.tokens):
        return False
    return batch.biases is None and batch.needs_logits
