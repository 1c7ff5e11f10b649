"""Run benchmarks and print a table of all results: ``python -m tandem.benchmarks.run``.

Arguments select benchmarks by name, without their folder. Each runs in its own process: thread
counts and allocators must not leak from one to the next. Those that need files or programs from
elsewhere are run by their own commands, such as ``quantised_models`` and ``model_errors``, which
compare with llama.cpp.
"""

from __future__ import annotations

import json
import subprocess
import sys

from tandem.benchmarks.support.report import RESULTS

_MODULES = (
    "startup",
    "loading",
    "router.placement",
    "router.workers",
    "router.tokens",
    "router.holds",
    "node.served_rate",
    "handoff_tcp",
    "handoff_shared_memory",
    "handoff_blocks",
    "last_kv",
    "decode_steps",
    "quantised_products",
    "quantised_experts",
    "engine.against_transformers",
    "node.async_scheduling",
    "overload",
    "interference",
    "measuring_client",
    "node.grammar_masks",
    "node.plane_beside_launches",
    "node.step_host",
    "mixed_load",
)
BENCHMARKS = {module.rpartition(".")[2]: module for module in _MODULES}


def table() -> str:
    """All results on disk as Markdown."""
    lines = [
        "| metric | value | unit | goal | holds | against | ratio |",
        "|---|---|---|---|---|---|---|",
    ]
    for file in sorted(RESULTS.rglob("*.json"), key=lambda file: file.name):
        for row in json.loads(file.read_text()):
            holds = {True: "yes", False: "no", None: ""}[row["holds"]]
            ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f}"
            lines.append(
                f"| {row['metric']} | {row['value']:.4g} | {row['unit']} | {row['goal']} | {holds} "
                f"| {row['against']} | {ratio} |"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    names = sys.argv[1:] or list(BENCHMARKS)
    unknown = set(names) - BENCHMARKS.keys()
    if unknown:
        sys.exit(f"unknown benchmarks {sorted(unknown)}; there are {', '.join(BENCHMARKS)}")
    for name in names:
        print(f"== {name}", flush=True)
        module = f"tandem.benchmarks.{BENCHMARKS[name]}"
        subprocess.run([sys.executable, "-m", module], check=True)
    text = table()
    (RESULTS / "RESULTS.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
