"""The memory that loaded weights take."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import FunctionType, MethodType

import numpy as np
import torch

from ...kernels.operators import Operators
from ...kernels.reference.linear import PackedHalf
from ..models.parallel import WeightPlacement

_OURS = __name__.partition(".")[0]


def resident_bytes(part: object) -> int:
    """Bytes of the tensors and arrays of a decoder part, counting each storage once. Operators
    close over packed weights, so this follows functions as well as attributes.

    It does not follow a part's placement, which leads to the source of all weights, and through a
    GGUF file to a vocabulary that every layer would walk again."""
    sizes: dict[int, int] = {}
    visited: dict[int, object] = {}  # keeps the objects alive, so that ids stay unique
    stack = [part]
    while stack:
        each = stack.pop()
        if id(each) in visited or isinstance(each, Operators | WeightPlacement):
            continue
        visited[id(each)] = each
        if isinstance(each, torch.Tensor):
            if each.is_mkldnn:
                sizes[id(each)] = each.numel() * each.element_size()
            else:
                storage = each.untyped_storage()
                sizes[storage.data_ptr()] = storage.nbytes()
        elif isinstance(each, np.ndarray):
            while isinstance(each.base, np.ndarray):
                each = each.base
            sizes.setdefault(each.ctypes.data, each.nbytes)
        elif isinstance(each, PackedHalf):
            sizes[id(each)] = each.nbytes
        else:
            stack.extend(_references(each))
    return sum(sizes.values())


def _references(each: object) -> Iterator[object]:
    """The objects that an object of this package, a function or a container refers to."""
    match each:
        case list() | tuple():
            yield from each
        case dict():
            yield from each.values()
        case partial():
            yield from (each.func, *each.args, *each.keywords.values())
        case MethodType():
            yield each.__self__
        case FunctionType():
            yield from (cell.cell_contents for cell in each.__closure__ or ())
        case _ if type(each).__module__.partition(".")[0] == _OURS:
            slots = [name for kind in type(each).__mro__ for name in getattr(kind, "__slots__", ())]
            yield from getattr(each, "__dict__", {}).values()
            yield from (getattr(each, name, None) for name in slots)
