"""Models whose layers keep KV of different shapes: parity, and handoffs between unequal sides."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.shared.engine.rank.runner import ModelRunner
from tandem.shared.handoff.plane.canary import canary_prompt, coarsest, worst_difference
from tandem.shared.handoff.plane.messages import Compare, Received
from tandem.shared.handoff.wire.head_parts import parts_of
from tandem.shared.kv.cache import KVCache
from tandem.shared.kv.layout import heads_by_rank
from tandem.shared.kv.planning import bytes_per_block
from tandem.shared.models.fingerprint import model_fingerprint
from tandem.shared.models.spec import tensor_parallel_problem
from tandem.tests.shared.handoff.support.plane_pair import PlaneRank, until
from tandem.tests.support.checkpoints import mixed_kv, tiny_models
from tandem.tests.support.layers_ready import layer_ready
from tandem.tests.support.runners import build_runner

from .test_kv_formats import logits
from .test_parity import STEPS, consecutive, greedy, prompt_of, scattered_slots

LENGTH = 50


@pytest.fixture(scope="module", autouse=True)
def family(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with mixed_kv.knowing(tmp_path_factory.mktemp("site")):
        yield


@pytest.fixture(scope="module", params=mixed_kv.MODELS)
def model(request: pytest.FixtureRequest, model_root: Path) -> Any:
    """The folder, and the tokens after a prompt as transformers has them."""
    folder = model_root / f"mixed_{request.param}"
    reference = mixed_kv.Reference(request.param)
    reference.save(folder)
    return folder, reference.greedy(prompt_of(LENGTH), STEPS)


def runner_for(folder: Path, block_size: int = 4, **changes: Any) -> ModelRunner:
    settings = {"dtype": "float32", "num_blocks": 60, **changes}
    return build_runner(folder, block_size=block_size, **settings)


@pytest.mark.parametrize("chunk", [1, 7, 10_000])
@pytest.mark.parametrize(
    "table", [consecutive(0, 70), scattered_slots(5, 70)], ids=["in a row", "apart"]
)
def test_tokens_are_those_of_transformers(model: Any, chunk: int, table: list[int]) -> None:
    folder, expected = model
    assert len(set(expected)) > STEPS // 2
    assert greedy(runner_for(folder), prompt_of(LENGTH), table, chunk) == expected


def test_the_planner_counts_what_the_tensors_take(model: Any) -> None:
    spec = runner_for(model[0], num_blocks=1).model.spec
    for dtype in ("float32", "float8_e4m3fn", "int8"):
        for size in (1, 2, 4):
            assert tensor_parallel_problem(spec, size) is None
            cache = KVCache(
                spec,
                num_blocks=3,
                block_size=5,
                dtype=getattr(torch, dtype),
                tp_rank=size - 1,
                tp_size=size,
            )
            nbytes = sum(each.nbytes for layer in cache.layers for each in layer)
            assert nbytes == 3 * bytes_per_block(spec, 5, dtype, size, size - 1)
    assert len({layer.token_bytes for layer in cache.layout}) > 1


def test_a_fingerprint_names_what_differs_between_layers(model: Any) -> None:
    spec = runner_for(model[0], num_blocks=1).model.spec
    fields = model_fingerprint(spec, None)
    assert " x1, " in fields["attention.num_kv_heads"]


class PlanesOfNode:
    """One data plane for each rank, over caches of the model."""

    def __init__(
        self,
        stack: ExitStack,
        name: str,
        spec: Any,
        ranks: int,
        block: int,
        dtype: str = "float32",
        **config: Any,
    ) -> None:
        self.heads = heads_by_rank(spec, ranks)
        self.table = [(7 * i + ranks) % 60 for i in range(-(-LENGTH // block))]
        self.caches = [
            KVCache(
                spec,
                num_blocks=60,
                block_size=block,
                dtype=getattr(torch, dtype),
                tp_rank=rank,
                tp_size=ranks,
            )
            for rank in range(ranks)
        ]
        self.planes = [
            stack.enter_context(
                PlaneRank(
                    name,
                    epoch=ord(name),
                    cache=cache,  # type: ignore[arg-type]
                    rank=rank,
                    tp_size=ranks,
                    slot_bytes=1 << 14,
                    **config,
                )
            )
            for rank, cache in enumerate(self.caches)
        ]


def hand_over(prefill: PlanesOfNode, decode: PlanesOfNode, layers: int) -> None:
    """Every layer of the prompt but its last token."""
    parts = parts_of(decode.heads, prefill.heads)
    span = {"first_token": 0, "end_token": LENGTH - 1}
    for part in parts:
        sender, receiver = prefill.planes[part.sender], decode.planes[part.receiver]
        receiver.expect(sender, 1, decode.table, heads=part.heads, **span)
        dtype = receiver.cache.kv_dtype
        sender.open(receiver, 1, prefill.table, heads=part.heads, dtype=dtype, **span)
    for plane in prefill.planes:
        for first in range(0, LENGTH - 1, 20):
            for layer in range(layers):
                layer_ready(plane.plane, 1, 1, layer, first, min(first + 20, LENGTH - 1))
    until(lambda: sum(len(plane.log.of(Received)) for plane in decode.planes) == len(parts))


@pytest.mark.parametrize(
    ("ranks", "dtype"),
    [(1, "float32"), (2, "float32"), (4, "float32"), (2, "bfloat16"), (2, "int8")],
)
def test_a_receiver_continues_what_went_over_unequal_sides(
    model: Any, ranks: int, dtype: str
) -> None:
    """From one rank to several with another block size, and from those to one with a third."""
    folder, expected = model
    first, last = runner_for(folder, 8), runner_for(folder, 3)
    spec = first.model.spec
    with ExitStack() as stack:
        prefill = PlanesOfNode(stack, "p", spec, 1, 8)
        between = PlanesOfNode(stack, "m", spec, ranks, 5, dtype)
        decode = PlanesOfNode(stack, "d", spec, 1, 3, listen_host=None)
        prompt = prompt_of(LENGTH)
        first.cache = prefill.caches[0]
        logits(first, prompt[:-1], 0, prefill.table)
        hand_over(prefill, between, len(spec.layers))
        hand_over(between, decode, len(spec.layers))
        last.cache = decode.caches[0]
        table = [*decode.table, *(b for b in range(60) if b not in decode.table)]
        output, values = [], prompt
        for _ in range(STEPS if dtype == "float32" else 1):
            row = logits(last, values[-1:], len(values) - 1, table)
            output.append(int(row.argmax()))
            values = [*values, output[-1]]
    assert output == expected[: len(output)]


def test_a_canary_names_the_component_that_differs(model: Any) -> None:
    runner = runner_for(model[0])
    cache, prompt = runner.cache, canary_prompt(tiny_models.VOCAB, 512)
    end, ours, theirs = len(prompt) - 1, consecutive(0, 31), scattered_slots(9, 31)
    for table in (ours, theirs):
        logits(runner, prompt[:end], 0, table)
    compare = Compare(
        transfer_id=0,
        attempt=0,
        ours=tuple(ours),
        theirs=tuple(theirs),
        first_token=0,
        end_token=end,
        rounding=coarsest(["float32"]),
        exact_layers=len(cache.layout),
    )
    assert worst_difference(cache, compare).ratio < 1
    for layer, layout in enumerate(cache.layout):
        for number, component in enumerate(layout.components):
            slot = theirs[2] * cache.block_size + 1
            cache.layers[layer][number][-1, slot, -1] += 3
            worst = worst_difference(cache, compare)
            assert (worst.layer, worst.component) == (layer, component.name) and worst.ratio > 1
            cache.layers[layer][number][-1, slot, -1] -= 3
