"""A checker of the order of accesses to memory by host threads and by streams of a GPU.

Everything runs at once and in one thread of the test, which says for which thread and stream it
runs. Each of these has a vector clock: what it knows to be over. An operator of torch is an access
of the current stream, which knows what its thread knew at the launch; an event passes a stream's
clock to whoever waits for it. An access that meets an earlier one of which it does not know, one of
them a write, is a race, whatever the results are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

# Memory is watched in pieces of this size; what shares one should not be used apart.
GRAIN = 64
Clock = dict[str, int]
# Address and bytes.
Span = tuple[int, int]
_INDEXED = ("aten::index", "aten::index_put_")


@dataclass(slots=True)
class _Grain:
    """The last write of a piece of memory, and the reads since: by whom, when and in what."""

    written: tuple[str, int, str] | None = None
    read: dict[str, tuple[int, str]] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class OrderedWait:
    """A ``Wait`` in place of ``kernels.streams.EventWait``. It is over when somebody has waited, or
    skipped the wait, in which case nobody learns what happened before the mark."""

    order: StreamOrder
    marked: dict[str, int]
    waited: bool = False
    skipped: bool = False

    def __call__(self) -> None:
        self.waited = True
        self.order.passed(self.marked)

    def is_over(self) -> bool:
        if self.waited:
            self.order.passed(self.marked)
        return self.waited or self.skipped

    def skip(self) -> None:
        self.skipped = True


class StreamOrder(TorchDispatchMode):
    """Watches the operators of torch while it is entered. ``races`` describes each race once."""

    def __init__(self) -> None:
        super().__init__()
        self.races: list[str] = []
        self.thread, self.stream = "host", "compute"
        self._clocks: dict[str, Clock] = {}
        self._grains: dict[int, _Grain] = {}
        # Memory that is freed may be used again at once, which is no race.
        self._kept: list[Any] = []

    # ---- who runs ------------------------------------------------------------------------------

    @contextmanager
    def running(self, thread: str, stream: str = "none") -> Iterator[None]:
        """Run as a host thread, which launches in a stream."""
        before = self.thread, self.stream
        self.thread, self.stream = thread, stream
        try:
            yield
        finally:
            self.thread, self.stream = before

    def tell(self, thread: str, other: str) -> None:
        """A message between threads: what the first knows, the other knows from now on."""
        self._join(other, self._clock(thread))

    def mark(self) -> OrderedWait:
        """A ``Mark`` in the current stream, in place of ``kernels.streams.marker``."""
        return OrderedWait(self, dict(self._clock(self.stream)))

    def passed(self, marked: dict[str, int]) -> None:
        """The current thread learns that a mark was passed."""
        self._join(self.thread, marked)

    def wait_stream(self, other: str) -> None:
        """Let the current stream wait for all that was launched in another."""
        self._join(self.stream, self._clock(other))

    # ---- accesses ------------------------------------------------------------------------------

    def host(self, what: str, *, reads: Iterable[Span] = (), writes: Iterable[Span] = ()) -> None:
        """An access by the current thread."""
        self._access(self.thread, what, reads, writes)

    def launch(self, what: str, *, reads: Iterable[Span] = (), writes: Iterable[Span] = ()) -> None:
        """An access by the current stream, which this thread launches."""
        self._join(self.stream, self._clock(self.thread))
        self._access(self.stream, what, reads, writes)

    def keep(self, memory: Any) -> None:
        """Keep memory from being used for something else."""
        self._kept.append(memory)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        if func.is_view or name in ("aten::empty", "aten::detach"):
            return result
        reads, writes = list[Span](), list[Span]()
        arguments = zip(func._schema.arguments, args, strict=False)
        for index, (argument, value) in enumerate(arguments):
            spans = writes if argument.alias_info and argument.alias_info.is_write else reads
            if index == 0 and name in _INDEXED:
                spans += indexed_spans(value, args[1])
            else:
                for tensor in _tensors(value):
                    spans += spans_of(tensor)
                    self.keep(tensor.untyped_storage())
        if not func._schema.is_mutable:
            for tensor in _tensors(result):
                writes += spans_of(tensor)
                self.keep(tensor.untyped_storage())
        self.launch(name, reads=reads, writes=writes)
        return result

    # ---- clocks --------------------------------------------------------------------------------

    def _clock(self, who: str) -> Clock:
        return self._clocks.setdefault(who, {who: 0})

    def _join(self, who: str, other: Clock) -> None:
        clock = self._clock(who)
        for each, time in other.items():
            clock[each] = max(time, clock.get(each, 0))

    def _access(self, who: str, what: str, reads: Iterable[Span], writes: Iterable[Span]) -> None:
        clock = self._clock(who)
        clock[who] += 1
        for key in _grains(reads):
            grain = self._grains.setdefault(key, _Grain())
            self._meets(who, f"{what} reads", grain.written, key, "writes")
            grain.read[who] = clock[who], what
        for key in _grains(writes):
            grain = self._grains.setdefault(key, _Grain())
            self._meets(who, f"{what} writes", grain.written, key, "writes")
            for reader, (time, reading) in grain.read.items():
                self._meets(who, f"{what} writes", (reader, time, reading), key, "reads")
            self._grains[key] = _Grain((who, clock[who], what))

    def _meets(
        self, who: str, what: str, earlier: tuple[str, int, str] | None, key: int, does: str
    ) -> None:
        if earlier is None or self._clock(who).get(earlier[0], 0) >= earlier[1]:
            return
        race = f"{who}: {what} what {earlier[0]}: {earlier[2]} {does}"
        if race not in self.races:
            self.races.append(race)


def spans_of(x: torch.Tensor) -> list[Span]:
    """The memory of a tensor, in contiguous spans."""
    return _spans(x.data_ptr(), x.shape, x.stride(), x.element_size()) if x.numel() else []


def _spans(at: int, shape: Any, strides: Any, itemsize: int) -> list[Span]:
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size > 1 and stride != expected:
            break
        expected *= size
    else:
        return [(at, expected * itemsize)]
    return [
        span
        for index in range(shape[0])
        for span in _spans(at + index * strides[0] * itemsize, shape[1:], strides[1:], itemsize)
    ]


def indexed_spans(x: torch.Tensor, indices: Any) -> list[Span]:
    """The memory of ``x[indices]``: of the slots that an index of the second dimension names, as
    caches have them, or of a vector's elements."""
    dim = next(number for number, index in enumerate(indices) if index is not None)
    inner = x.shape[dim + 1 :]
    heads = range(x.shape[0]) if dim else [0]
    return [
        span
        for head in heads
        for slot in set(indices[dim].tolist())
        for span in _spans(
            x.data_ptr() + (head * x.stride(0) * dim + slot * x.stride(dim)) * x.element_size(),
            inner,
            x.stride()[dim + 1 :],
            x.element_size(),
        )
    ]


def memory_of(buffer: Any) -> Span:
    """The memory of a buffer of the host."""
    array = np.frombuffer(buffer, dtype=np.uint8)
    return int(array.ctypes.data), array.nbytes


def _grains(spans: Iterable[Span]) -> set[int]:
    return {
        key
        for at, size in spans
        if size
        for key in range(at // GRAIN, (at + size - 1) // GRAIN + 1)
    }


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if value.layout is torch.strided:  # no weight that oneDNN has packed
            yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)
