"""The cost of grammars: masks of a batch of 32 relative to a decode step, and the first mask.

    python -m tandem.benchmarks.node.grammar_masks [--vocab 151936] [--rows 32]

The lower bound of a decode step is its logits: one product of [rows, hidden] with the output
embedding. The tokenizer is synthetic, with tokens of realistic lengths.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tandem.benchmarks.support.report import benchmark_parser, publish
from tandem.kernels.reference.token_mask import TokenMask
from tandem.shared.engine.structured.constraint import Constraint
from tandem.shared.engine.structured.grammar import Grammar
from tandem.shared.engine.structured.llguidance_backend import LLGuidanceBackend
from tandem.shared.engine.structured.params import StructuredOutputs
from tandem.shared.text.tokenizer_files import TokenizerFiles

HIDDEN = 896
STEPS = 40


def tokenizer_of(vocab_size: int) -> TokenizerFiles:
    """A tokenizer of random byte pairs and an end token."""
    rng = random.Random(0)
    vocabulary = {text: number for number, text in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    tokens, merges = list(vocabulary), []
    while len(vocabulary) < vocab_size - 1:
        left, right = rng.choice(tokens), rng.choice(tokens)
        if len(left + right) < 12 and left + right not in vocabulary:
            vocabulary[left + right] = len(vocabulary)
            merges.append((left, right))
            tokens.append(left + right)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    return TokenizerFiles(tokenizer.to_str(), "made up")


def schema_of(size: int) -> dict[str, Any]:
    """A JSON schema of at least ``size`` characters."""
    kinds = ({"type": "string"}, {"type": "integer"}, {"enum": ["red", "green", "blue"]})
    properties: dict[str, Any] = {}
    while len(json.dumps(properties)) < size:
        properties[f"field_{len(properties)}"] = kinds[len(properties) % len(kinds)]
    return {"type": "object", "properties": properties, "required": list(properties)}


def seconds(work: Callable[[], object]) -> float:
    """CPU seconds of this thread, which does all the work, so other processes do not matter."""
    start = time.thread_time()
    work()
    return time.thread_time() - start


def allowed(mask: bytes, rng: random.Random, vocab_size: int) -> int:
    while True:
        token = rng.randrange(vocab_size)
        if mask[token >> 3] >> (token & 7) & 1:
            return token
        if rng.random() < 0.001:
            return next(t for t in range(vocab_size) if mask[t >> 3] >> (t & 7) & 1)


def measure(vocab_size: int, rows: int) -> list[dict[str, Any]]:
    """Rows of the report for a batch of ``rows`` constrained sequences."""
    torch.set_num_threads(1)
    backend = LLGuidanceBackend(tokenizer_of(vocab_size), vocab_size, [vocab_size - 1])
    key = StructuredOutputs(json=schema_of(2048)).key()
    first = statistics.median(
        seconds(lambda: Constraint(backend.compile(key), ()).next_mask([])) for _ in range(10)
    )
    computing, applying = steps(backend.compile(key), vocab_size, rows)
    head, hidden = torch.randn(vocab_size, HIDDEN), torch.randn(rows, HIDDEN)
    logits = statistics.median(seconds(lambda: hidden @ head.T) for _ in range(5))
    against = f"the step's logits, hidden size {HIDDEN} ({logits * 1e3:.0f} ms)"
    batch = f"batch {rows}, vocabulary {vocab_size:,}"
    return [
        {"metric": "first mask of a 2 kB schema", "value": first * 1e3, "unit": "ms",
         "goal": "<=50"},
        {"metric": f"masks computed, beside the step; {batch}", "value": computing * 1e3,
         "unit": "ms", "against": against, "ratio": computing / logits},
        {"metric": f"masks applied, in the step; {batch}", "value": applying * 1e3,
         "unit": "ms", "against": against, "ratio": applying / logits},
        {"metric": f"masks, both; {batch}", "value": (computing + applying) * 1e3,
         "unit": "ms", "goal": "<=0.1", "against": against,
         "ratio": (computing + applying) / logits},
    ]  # fmt: skip


def steps(grammar: Grammar, vocab_size: int, rows: int) -> tuple[float, float]:
    """Median CPU seconds per step for computing and for applying the masks."""
    rng, table = random.Random(1), TokenMask()
    constraints = [Constraint(grammar, [vocab_size - 1]) for _ in range(rows)]
    tokens_by_row: list[list[int]] = [[] for _ in constraints]
    logits, computing, applying = torch.randn(rows, vocab_size), [], []
    for _ in range(STEPS):
        start = time.thread_time()
        masks_or_none = [
            row.next_mask(tokens) for row, tokens in zip(constraints, tokens_by_row, strict=True)
        ]
        computing.append(time.thread_time() - start)
        masks = [mask or bytes(-(-vocab_size // 8)) for mask in masks_or_none]
        copy = logits.clone()
        applying.append(seconds(lambda: table.apply(copy, list(range(rows)), masks)))  # noqa: B023
        tokens_by_row = [[allowed(mask, rng, vocab_size)] if any(mask) else [] for mask in masks]
    return statistics.median(computing), statistics.median(applying)


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--rows", type=int, default=32)
    options = parser.parse_args()
    publish("node/grammar_masks", measure(options.vocab, options.rows), dry=options.dry)


if __name__ == "__main__":
    main()
