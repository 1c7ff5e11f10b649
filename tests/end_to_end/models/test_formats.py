"""Nodes that keep KV in different formats: it travels in that of the decode node."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tandem.tests.end_to_end.support.clients import prompt
from tandem.tests.end_to_end.support.cluster import (
    TestCluster,
    committed_transfers,
    node_metric,
    running,
)
from tandem.tests.end_to_end.support.ensemble import Ensemble
from tandem.tests.support.checkpoints.kv_scales import NAMINGS, write_kv_scales
from tandem.tests.support.extent import selected

FORGETFUL = "--no-enable-prefix-caching"
FIELDS = {"max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
BATCH = [prompt(length, length) for length in (17, 65, 200)]
# A name says the format of the KV; the first has weights in it as well.
FORMATS = {
    "bfloat16": (1, 8, "--dtype=bfloat16"),
    "float16": (2, 32, "--kv-cache-dtype=float16"),
    "float32": (1, 64, "--kv-cache-dtype=float32"),
    "fp8": (2, 16, "--kv-cache-dtype=fp8"),
    "fp8_e4m3": (1, 8, "--kv-cache-dtype=fp8_e4m3"),
    "int8": (2, 16, "--kv-cache-dtype=int8"),
    "int8_too": (1, 8, "--kv-cache-dtype=int8"),
}


@pytest.fixture(scope="module")
def formats(tmp_path_factory: pytest.TempPathFactory, tiny_model: str) -> Iterator[Ensemble]:
    pairs = [("bfloat16", "float16"), ("float32", "fp8"), ("fp8", "fp8_e4m3")]
    pairs += [("bfloat16", "int8"), ("int8", "int8_too")]
    kinds = {name: (*kind, FORGETFUL) for name, kind in FORMATS.items()}
    folder = tmp_path_factory.mktemp("formats")
    # Which only a cache in fp8 uses; so large that they clamp nothing.
    write_kv_scales(Path(tiny_model), folder / "scaled", NAMINGS["vllm"], size=30)
    with running(folder, str(folder / "scaled")) as cluster:
        yield Ensemble(cluster, kinds, pairs)


def first_logprobs(choices: list[dict[str, Any]]) -> list[float]:
    return [choice["logprobs"]["token_logprobs"][0] for choice in choices]


@pytest.mark.parametrize(
    ("there", "here", "tolerance"),
    selected(
        [("bfloat16", "int8", 0.1), ("float32", "fp8", 0.5)],
        full=[
            ("bfloat16", "float16", 0.1),
            ("fp8", "float32", 0.5),
        ],
    ),
)
def test_formats_may_differ(
    formats: Ensemble, aggregated: TestCluster, there: str, here: str, tolerance: float
) -> None:
    """The KV arrives in the decode node's format. What comes out differs from what float32 gives by
    no more than the rounding of the coarser format does, in the log-probability of the first
    token."""
    want = aggregated.complete(BATCH, logprobs=1, **FIELDS)["choices"]
    choices = handed_over(formats, there, here)
    assert first_logprobs(choices) == pytest.approx(first_logprobs(want), abs=tolerance)


@pytest.mark.parametrize("pair", selected([("int8_too", "int8")], full=[("fp8_e4m3", "fp8")]))
def test_a_format_of_both_sides_is_handed_over_as_it_is(
    formats: Ensemble, pair: tuple[str, str]
) -> None:
    formats.apart(*pair)
    want = formats.cluster.complete(BATCH, logprobs=1, **FIELDS)["choices"]
    choices = handed_over(formats, *pair)
    assert first_logprobs(choices) == pytest.approx(first_logprobs(want), abs=1e-2)
    assert [choice["token_ids"] for choice in choices] == [choice["token_ids"] for choice in want]


def handed_over(formats: Ensemble, there: str, here: str) -> list[dict[str, Any]]:
    """The choices, whose prompts one node has computed and the other one received."""
    prefill, decode = formats.cast(there, here)
    before = committed_transfers(decode)
    choices = formats.cluster.complete(BATCH, logprobs=1, **FIELDS)["choices"]
    assert committed_transfers(decode) - before == len(BATCH)
    assert node_metric(decode, 'tandem_canaries_total{outcome="passed"}') >= 1
    assert node_metric(decode, 'tandem_canaries_total{outcome="mismatch"}') == 0
    formats.cluster.wait_idle(prefill, decode)
    return list(choices)
