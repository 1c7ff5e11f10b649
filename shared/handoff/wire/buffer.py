"""Memory of a payload: a memoryview or, on a GPU, a tensor of bytes."""

from __future__ import annotations

from typing import Any, TypeAlias

Buffer: TypeAlias = Any
