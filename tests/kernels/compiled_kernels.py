"""What Triton has made of each kernel, recorded, so that only what has changed is compiled.

Machine code follows from a kernel's source with all that it calls, from the types and constants of
a launch, from the generation, and from the version of Triton, which brings its own assembler.
`make kernels` compiles all of them and writes ``compiled/<version>.csv``, with a line for each. So
the diff of a change also shows what it costs in registers, memory and instructions.
"""

from __future__ import annotations

import csv
import hashlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import triton
from triton.runtime.jit import JITCallable, JITFunction

from tandem.tests.support.extent import FULL

FILE = Path(__file__).parent / "compiled" / f"{triton.__version__}.csv"
# Of a SHA-256 in hexadecimal.
DIGITS = 16


@dataclass(frozen=True)
class MachineCode:
    """What a program of a kernel takes, in bytes; registers per thread."""

    num_warps: int
    registers: int
    stack: int
    local: int
    shared: int
    # Copies of 16 bytes to shared memory.
    asynchronous: int
    # Products that leave a warp free, which GPUs have since sm_90.
    async_products: int
    # The smallest load or store, but for a number of 64 bits.
    smallest: int
    # Bytes that a thread moves 16 at a time, without a loop or in an iteration.
    vectors: int
    # Those of its longest inner loop, where they are counted.
    instructions: int


@dataclass
class Record:
    """The machine code of kernels by ``digest``, as read and as seen since."""

    read: dict[str, MachineCode]
    names: dict[str, tuple[int, str]] = field(default_factory=dict)
    seen: dict[str, MachineCode] = field(default_factory=dict)

    def note(self, digest: str, generation: int, name: str, code: MachineCode) -> None:
        """A kernel is as described; ``name`` tells readers which it is."""
        self.names.setdefault(digest, (generation, name))
        self.seen[digest] = code

    def differences(self) -> list[str]:
        """What the file has otherwise, lacks, or has and should not. In the full extent there are
        kernels that it need not have."""
        lines = []
        for digest, code in self.seen.items():
            recorded = self.read.get(digest)
            generation, name = self.names[digest]
            if recorded is None and not FULL:
                lines.append(f"{generation} {name}: not recorded")
            elif recorded not in (None, code):
                lines.append(f"{generation} {name}: not as recorded")
        return lines + [f"recorded as {each}: gone" for each in self.read if each not in self.seen]

    def write(self) -> None:
        """Write what was seen to the file."""
        FILE.parent.mkdir(exist_ok=True)
        with open(FILE, "w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(
                ["generation", "kernel", "digest", *(f.name for f in fields(MachineCode))]
            )
            for digest, (generation, name) in self.names.items():
                code = asdict(self.seen[digest]).values()
                writer.writerow([generation, name, digest, *code])


def read_record(generations: Iterable[int]) -> Record:
    """The record of these generations for this version of Triton; empty if there is none."""
    if not FILE.is_file():
        return Record({})
    wanted = {str(each) for each in generations}
    with open(FILE, newline="") as file:
        lines = [row for row in csv.DictReader(file) if row["generation"] in wanted]
    names = [each.name for each in fields(MachineCode)]
    return Record(
        {row["digest"]: MachineCode(**{name: int(row[name]) for name in names}) for row in lines}
    )


def digest(kernel: JITFunction[Any], key: str, generation: int) -> str:
    """Of all that the machine code of a launch follows from; ``key`` is Triton's own for it."""
    words = f"{triton.__version__} {generation} {kernel.cache_key} {key}"
    return hashlib.sha256(words.encode()).hexdigest()[:DIGITS]


def ignore_lines() -> None:
    """Let a kernel have one key wherever it stands in its file. Triton puts the line into it, which
    debuggers show; machine code does not depend on it."""
    JITCallable.starting_line_number = property(lambda kernel: 0, lambda kernel, line: None)
