"""Tables with a row for each token of the vocabulary."""

from __future__ import annotations

import torch

from ..parallel import WeightPlacement, WeightSlot
from .linear_method import LinearPart, choose_table
from .part import Part


class VocabParallel(Part):
    """A [vocabulary, hidden] table whose rows are split over ranks: embedding, head, or both."""

    def __init__(
        self,
        place: WeightPlacement,
        vocab: int,
        hidden: int,
        *,
        embeds: bool,
        is_head: bool,
        bias: bool = False,
    ) -> None:
        self.tp = place.tp
        self.vocab = vocab
        self.embeds = embeds
        self.is_head = is_head
        self.mine = place.tp.shard(vocab)
        # Ranks gather equal shapes, so the tables of the last ranks are padded with zeros.
        padding = -(-vocab // place.tp.size) - len(self.mine)
        part = LinearPart(
            place.name("weight"), (vocab, self.mine), (hidden, range(hidden)), padding
        )
        self.method = choose_table(place, part)
        self.bias: torch.Tensor | None = None
        if bias:
            self.bias = place.empty(len(self.mine) + padding).zero_()
            self.bias_name = place.name("bias")

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Look up the rows of tokens."""
        if self.tp.size == 1:
            return self.method.rows(tokens)
        local = tokens - self.mine.start
        elsewhere = (local < 0) | (local >= len(self.mine))
        rows = self.method.rows(local.masked_fill(elsewhere, 0))
        return self.tp.all_reduce(rows.masked_fill_(elsewhere[:, None], 0))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """[rows, vocabulary] in fp32 on rank 0, ``None`` on the others."""
        parts = self.tp.gather(self.method(hidden))
        if not parts:
            return None
        full = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        return full[:, : self.vocab].float()

    def own_slots(self) -> dict[str, WeightSlot]:
        slots = self.method.weight_slots()
        if self.bias is not None:
            mine = self.mine
            slots[self.bias_name] = WeightSlot(
                self.bias[: len(mine)], (self.vocab,), 0, mine.start, mine.stop
            )
        return slots

    def pack(self) -> None:
        """Pack a head. One that also embeds keeps its rows, unless they can be read from the packed
        copy."""
        if self.is_head:
            self.method.finish_loading(self.bias, keep_rows=self.embeds)
