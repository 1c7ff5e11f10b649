"""The cost of grammars: masks of a batch of 32 against a decode step, and the first mask.

    python -m tandem.tests.benchmarks.grammar_masks [--vocab 151936] [--rows 32]

The decode step is bounded from below by its logits: one product of [rows, hidden] and the
vocabulary. The tokenizer is made up; its tokens have the lengths of real ones.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tandem.kernels.reference.token_mask import TokenMask
from tandem.shared.engine.structured.constraint import Constraint
from tandem.shared.engine.structured.llguidance_backend import LLGuidanceBackend
from tandem.shared.engine.structured.params import StructuredOutputs
from tandem.shared.text.tokenizer_files import TokenizerFiles

HIDDEN = 896
STEPS = 40


def tokenizer_of(vocab_size: int) -> TokenizerFiles:
    """Byte pairs at random, and an end token."""
    rng = random.Random(0)
    vocabulary = {text: number for number, text in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    known, merges = list(vocabulary), []
    while len(vocabulary) < vocab_size - 1:
        left, right = rng.choice(known), rng.choice(known)
        if len(left + right) < 12 and left + right not in vocabulary:
            vocabulary[left + right] = len(vocabulary)
            merges.append((left, right))
            known.append(left + right)
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<|end|>"])
    return TokenizerFiles(made.to_str(), "made up")


def schema_of(size: int) -> dict[str, Any]:
    """A schema of at least so many characters."""
    kinds = ({"type": "string"}, {"type": "integer"}, {"enum": ["red", "green", "blue"]})
    properties: dict[str, Any] = {}
    while len(json.dumps(properties)) < size:
        properties[f"field_{len(properties)}"] = kinds[len(properties) % len(kinds)]
    return {"type": "object", "properties": properties, "required": list(properties)}


def seconds(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def allowed(mask: bytes, rng: random.Random, vocab_size: int) -> int:
    while True:
        token = rng.randrange(vocab_size)
        if mask[token >> 3] >> (token & 7) & 1:
            return token
        if rng.random() < 0.001:
            return next(t for t in range(vocab_size) if mask[t >> 3] >> (t & 7) & 1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--rows", type=int, default=32)
    given = parser.parse_args()
    backend = LLGuidanceBackend(tokenizer_of(given.vocab), given.vocab, [given.vocab - 1])
    key = StructuredOutputs(json=schema_of(2048)).key()
    first = statistics.median(
        seconds(lambda: Constraint(backend.compile(key), ()).next_mask([])) for _ in range(10)
    )
    grammar, rng = backend.compile(key), random.Random(1)
    rows = [Constraint(grammar, [given.vocab - 1]) for _ in range(given.rows)]
    drawn: list[list[int]] = [[] for _ in rows]
    logits, table = torch.randn(given.rows, given.vocab), TokenMask()
    computing, applying = [], []
    for _ in range(STEPS):
        begun = time.perf_counter()
        found = [row.next_mask(tokens) for row, tokens in zip(rows, drawn, strict=True)]
        computing.append(time.perf_counter() - begun)
        masks = [mask or bytes(-(-given.vocab // 8)) for mask in found]
        copy = logits.clone()
        begun = time.perf_counter()
        table.apply(copy, list(range(given.rows)), masks)
        applying.append(time.perf_counter() - begun)
        drawn = [[allowed(mask, rng, given.vocab)] if any(mask) else [] for mask in masks]
    head, hidden = torch.randn(given.vocab, HIDDEN), torch.randn(given.rows, HIDDEN)
    step = statistics.median(seconds(lambda: hidden @ head.T) for _ in range(5))
    masks_s, apply_s = statistics.median(computing), statistics.median(applying)
    print(f"first mask of a schema of 2 kB      {first * 1e3:8.2f} ms")
    print(f"masks of a step, beside it          {masks_s * 1e3:8.2f} ms")
    print(f"masks applied, in it                {apply_s * 1e3:8.2f} ms")
    print(f"logits of a step, hidden size {HIDDEN}  {step * 1e3:8.2f} ms")
    print(f"ratio of applying to the logits     {apply_s / step:8.3f}")
    print(f"ratio of both to the logits         {(masks_s + apply_s) / step:8.3f}")


if __name__ == "__main__":
    main()
