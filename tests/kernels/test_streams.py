"""A rank's streams, by torch's functions and no GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tandem.kernels.streams import marker, use_background_stream, use_compute_stream

GPU = torch.device("cuda", 1)


class FakeStream:
    """Knows its priority, and for which streams it waits."""

    cuda_stream = 77

    def __init__(self, device: torch.device, priority: int = 9) -> None:
        self.device, self.priority = device, priority
        self.waited_for: list[Any] = []

    def wait_stream(self, other: Any) -> None:
        self.waited_for.append(other)


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[FakeStream]:
    """The streams that were set, beginning with the default one."""
    used = [FakeStream(GPU)]
    for name, function in {
        "Stream": FakeStream,
        "set_stream": used.append,
        "current_stream": lambda device: used[-1],
        "set_device": lambda device: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, function)
    return used


def test_computing_has_priority_over_copies(used: list[FakeStream]) -> None:
    use_compute_stream(GPU)
    assert use_background_stream(GPU) == FakeStream.cuda_stream
    default, compute, background = used
    assert (compute.priority, background.priority) == (-1, 0)
    assert compute.waited_for == [default]
    assert compute.device == background.device == GPU


def test_a_mark_sleeps_until_the_current_stream_has_passed_it(
    used: list[FakeStream], monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded: list[Any] = []

    def event(*, blocking: bool) -> SimpleNamespace:
        assert blocking  # otherwise a core would spin
        return SimpleNamespace(
            record=recorded.append,
            synchronize=lambda: recorded.append("over"),
            query=lambda: "over" in recorded,
        )

    monkeypatch.setattr(torch.cuda, "Event", event)
    mark = marker(GPU)
    assert mark is not None
    use_compute_stream(GPU)
    wait = mark()
    assert not wait.is_over()
    wait()
    assert wait.is_over()
    assert recorded == [used[-1], "over"]


def test_a_cpu_has_no_streams() -> None:
    cpu = torch.device("cpu")
    use_compute_stream(cpu)
    assert use_background_stream(cpu) == 0 and marker(cpu) is None
