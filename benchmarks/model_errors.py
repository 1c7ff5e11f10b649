"""Errors of whole GGUF models on a CPU with int8 dot products, beside llama.cpp's.

    python -m tandem.benchmarks.model_errors FILE ... --llama-python PYTHON

PYTHON is an interpreter that has llama-cpp-python. Windows of tokens are spread over this
repository's documents. Their logits as a rank computes them, and as llama.cpp does with the same
file, are compared with exact ones: the products of torch's operators in float32 with the decoded
weights. Both cache KV in float32, Tandem's default for quantised weights. A logit's error counts
relative to the row's means, which softmax ignores.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tandem.benchmarks.support.llama_process import LlamaProcess
from tandem.benchmarks.support.report import benchmark_parser, publish
from tandem.kernels.operators import Operators
from tandem.shared.engine.device import operators_for
from tandem.shared.engine.plan import SequenceStep, StepColumns
from tandem.shared.text.tokenizer import Tokenizer
from tandem.shared.weights.source import open_source, read_spec
from tandem.tests.support.runners import build_runner

WINDOW = 512
KV_DTYPE = "float32"
ROOT = Path(__file__).parents[1]
# Ours relative to llama.cpp's: what two roundings of the same size differ by on so few tokens.
GOAL = "<=1.1"

Logits = Callable[[list[int]], torch.Tensor]


class RowErrors(NamedTuple):
    """Errors of each row, [rows]."""

    divergence: torch.Tensor  # KL from the exact distribution, in nats
    squares: torch.Tensor  # mean square of its logits' errors
    exact_squares: torch.Tensor  # mean square of its exact logits
    largest: torch.Tensor
    agrees: torch.Tensor  # whether the best token is the exact one
    loss: torch.Tensor  # of the token that follows, in nats; NaN for a window's last row

    def relative(self) -> float:
        """Error of the logits relative to their size, in percent."""
        return 100 * math.sqrt(self.squares.mean() / self.exact_squares.mean())

    def agreement(self) -> float:
        """Rows whose best token is the exact one, in percent."""
        return 100 * self.agrees.float().mean().item()

    def perplexity(self) -> float:
        return math.exp(self.loss.nanmean())


def windows_of(file: str, count: int) -> list[list[int]]:
    """Windows of tokens, spread over the documents."""
    documents = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    text = "\n".join(document.read_text() for document in documents)
    tokens = Tokenizer.load(open_source(file).tokenizer_files()).encode(text)
    return [
        tokens[start : start + WINDOW] for start in range(0, len(tokens), len(tokens) // count)
    ][:count]


def logits_by(file: str, operators: Operators, dtype: str) -> Logits:
    """What computes the logits [tokens, vocab] of a sequence as a rank with these operators."""
    blocks = WINDOW // 16
    runner = build_runner(
        file, num_blocks=blocks, dtype=dtype, kv_dtype=KV_DTYPE, operators=operators
    )
    model = runner.model

    def logits(tokens: list[int]) -> torch.Tensor:
        columns = StepColumns.of([SequenceStep(0, tokens, 0, list(range(blocks)), False)])
        with torch.inference_mode():
            batch = runner.inputs.batch(columns).forward
            result = model.logits(model.forward(batch, runner.cache.kv))
        assert result is not None
        return result.float()

    return logits


def errors_of(logits: torch.Tensor, exact: torch.Tensor, tokens: list[int]) -> RowErrors:
    """The errors of a window's logits."""
    log_p, log_q = exact.log_softmax(-1), logits.log_softmax(-1)
    errors, exact = _centred(logits - exact), _centred(exact)
    loss = -log_q[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
    return RowErrors(
        divergence=(log_p.exp() * (log_p - log_q)).sum(-1),
        squares=errors.square().mean(-1),
        exact_squares=exact.square().mean(-1),
        largest=errors.abs().amax(-1),
        agrees=log_p.argmax(-1) == log_q.argmax(-1),
        loss=torch.cat([loss, torch.tensor([math.nan])]),
    )


def _centred(logits: torch.Tensor) -> torch.Tensor:
    return logits - logits.mean(-1, keepdim=True)


def measure(file: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The report's rows for a file."""
    vocab = read_spec(file).vocab_size
    compiled = operators_for(torch.device("cpu"), cpu_kernels="compiled")
    exact_logits = logits_by(file, Operators(), "float32")
    our_logits = logits_by(file, compiled, "auto")
    llama = LlamaProcess(
        options.llama_python,
        file,
        threads=options.threads,
        streams=1,
        context=WINDOW,
        kv_dtype=KV_DTYPE,
    )
    sides: dict[str, list[RowErrors]] = {"exact": [], "Tandem": [], "llama.cpp": []}
    for tokens in windows_of(file, options.windows):
        exact = exact_logits(tokens)
        logits = exact, our_logits(tokens), torch.from_numpy(llama.logits(tokens, vocab))
        for rows, each in zip(sides.values(), logits, strict=True):
            rows.append(errors_of(each, exact, tokens))
    llama.close()
    exact_rows, ours, theirs = (
        RowErrors(*map(torch.cat, zip(*parts, strict=True))) for parts in sides.values()
    )
    return report(Path(file).stem, exact_rows, ours, theirs)


def report(name: str, exact: RowErrors, ours: RowErrors, theirs: RowErrors) -> list[dict[str, Any]]:
    """Rows of the report for a file."""
    count = len(ours.divergence)
    divergences = ours.divergence.mean().item(), theirs.divergence.mean().item()
    difference = ours.divergence - theirs.divergence
    uncertainty = difference.std().item() / math.sqrt(count)
    results: list[dict[str, Any]] = [
        {
            "metric": f"KL divergence from exact products over {count} tokens, {name}",
            "value": divergences[0],
            "unit": "nats",
            "goal": GOAL,
            "against": f"llama.cpp ({divergences[1]:.3g}; standard error of the difference "
            f"{uncertainty:.1g})",
            "ratio": divergences[0] / divergences[1],
        }
    ]
    figures: list[tuple[str, str, str, Callable[[RowErrors], float]]] = [
        ("error of logits", "%", GOAL, RowErrors.relative),
        ("largest error of a logit", "nats", "", lambda rows: rows.largest.max().item()),
        ("best tokens that are the exact ones", "%", "", RowErrors.agreement),
    ]
    for metric, unit, goal, figure in figures:
        results.append(
            {
                "metric": f"{metric}, {name}",
                "value": figure(ours),
                "unit": unit,
                "goal": goal,
                "against": f"llama.cpp ({figure(theirs):.4g})",
                "ratio": figure(ours) / figure(theirs),
            }
        )
    perplexity = exact.perplexity()
    results.append(
        {
            "metric": f"perplexity, {name}",
            "value": ours.perplexity(),
            "unit": "tokens",
            "against": f"exact products ({perplexity:.2f}; llama.cpp {theirs.perplexity():.2f})",
            "ratio": ours.perplexity() / perplexity,
        }
    )
    return results


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("files", nargs="+")
    parser.add_argument("--llama-python", required=True, help="one that has llama-cpp-python")
    parser.add_argument("--windows", type=int, default=16, help=f"of {WINDOW} tokens")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    results = [row for file in options.files for row in measure(file, options)]
    publish("model_errors", results, dry=options.dry)


if __name__ == "__main__":
    main()
