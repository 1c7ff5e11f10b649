"""The ranks of ``test_tensor_parallel.py``: forks of a program that has imported what they need.

Reads groups as JSON on standard input, writes what each of their ranks drew to standard output.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from datetime import timedelta
from typing import Any

import torch

from tandem.shared.engine.plan import RankSampling, SamplerSpec, SequenceStep, StepPlan
from tandem.shared.models.parallel import TensorParallel
from tandem.tests.support.runners import build_runner


def run(tp: TensorParallel, folder: str, prompt: list[int], following: list[int]) -> dict[str, Any]:
    """Prefill and decode; every rank gets the tokens, as from a head."""
    runner = build_runner(folder, dtype="float32", block_size=4, num_blocks=100, tp=tp)
    table = list(range(2, 2 + (len(prompt) + len(following)) // 4 + 1))
    spec = SamplerSpec(1, RankSampling(temperature=0.0), 0, list(prompt))
    first = SequenceStep(1, prompt, 0, table, True, 2, tuple(prompt[1:]))
    result = runner.execute(StepPlan.of(0, [first], [spec]))
    generated = result.sampled.get(1, [])
    num_scored = sum(len(rows) for rows in result.prompt_logprobs.values())
    for index, token in enumerate(following[:-1]):
        sequence = SequenceStep(1, [token], len(prompt) + index, table, True)
        generated += runner.execute(StepPlan.of(1, [sequence])).sampled.get(1, [])
    return {"drawn": generated, "scored": num_scored}


def run_rank(rank: int, job: dict[str, Any]) -> list[dict[str, Any]]:
    """Join the group, run every model."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{job['rendezvous']}",
        rank=rank,
        world_size=job["size"],
        timeout=timedelta(seconds=60),
    )
    results = [run(TensorParallel(rank, job["size"]), *model) for model in job["models"]]
    torch.distributed.destroy_process_group()
    return results


def run_group(job: dict[str, Any]) -> list[Any]:
    """Each process gets one rank: a rank waits for the others before it does anything."""
    with multiprocessing.get_context("fork").Pool(job["size"]) as pool:
        ranks = [(rank, job) for rank in range(job["size"])]
        return pool.starmap(run_rank, ranks, chunksize=1)


def main() -> None:
    json.dump([run_group(job) for job in json.load(sys.stdin)], sys.stdout)


if __name__ == "__main__":
    main()
