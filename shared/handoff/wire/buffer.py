"""Memory of a payload: a memoryview or, on a GPU, a tensor of bytes. Apart from frames, whose
checksums need xxhash: the engine alone runs without it."""

from __future__ import annotations

from typing import Any, TypeAlias

Buffer: TypeAlias = Any
