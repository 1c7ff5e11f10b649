"""Memory that holds a payload: a memoryview or, in a GPU's memory, a tensor of bytes on it."""

from __future__ import annotations

from typing import Any, TypeAlias

Buffer: TypeAlias = Any
