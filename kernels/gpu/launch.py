"""Launches of compiled kernels without Triton's look-up.

At each launch Triton binds the arguments and looks up what it has compiled for them, which takes
longer than many kernels: a step that is launched kernel by kernel waits for the host. ``direct``
asks Triton once, and then launches the same compiled kernel for all arguments for which Triton
would find it. Addresses are passed as numbers, for which Triton does not ask the driver: a tensor
in host memory is an error here that the GPU finds, not Triton. Triton's launch hooks are not
called; profilers of the driver see all launches.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial, reduce, wraps
from operator import and_, attrgetter, or_
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
import triton
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

# Bits that an aligned address does not have: Triton compiles other kernels for multiples of 16.
_UNALIGNED = 15
_INT32_END = 1 << 31
_Arguments = ParamSpec("_Arguments")
_Constants = TypeVar("_Constants")
# All that a launch needs of a tensor.
_address: Callable[[torch.Tensor], int] = torch.Tensor.data_ptr
_dtype = attrgetter("dtype")
_device: Callable[[torch.Tensor], int] = torch.Tensor.get_device


class _Compiled(NamedTuple):
    """A kernel that Triton compiled, the function that launches it, and its constants' values."""

    kernel: Any  # must live as long as its function is launched: it unloads it
    run: Callable[..., object]
    constants: tuple[object, ...]


def direct(kernel: Any) -> Any:
    """A kernel that is launched like ``kernel``, in less time. Tensors come first among its
    arguments, then numbers, each of one type, and then constants, by name. An interpreted kernel
    stays as it is.
    """
    return _Direct(kernel) if isinstance(kernel, JITFunction) else kernel


class _Direct:
    """See ``direct``.

    What Triton compiles depends on the dtypes and the alignment of tensors, on whole numbers that
    it specialises for, and on the constants. Tensors that are not aligned and whole numbers of 64
    bits are left to it.
    """

    def __init__(self, kernel: JITFunction[Any]) -> None:
        self._kernel = kernel
        self._params = [each for each in kernel.params if not each.is_constexpr]
        constants = kernel.params[len(self._params) :]
        assert all(each.is_constexpr for each in constants), "constants come last"
        self._constants = [each.name for each in constants]
        # For each argument, the bits of an address for which Triton would compile another kernel.
        self._unaligned = [
            0 if each.do_not_specialize or each.do_not_specialize_on_alignment else _UNALIGNED
            for each in self._params
        ]
        # From the first launch on: the number of tensors, and the places of whole numbers that
        # Triton specialises for.
        self._tensors = 0
        self._specialised: list[int] = []
        self._compiled: dict[tuple[object, ...], _Compiled] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        if not self._tensors:
            self._inspect(arguments)
        tensors, numbers = arguments[: self._tensors], arguments[self._tensors :]
        addresses, device = [*map(_address, tensors)], _device(tensors[0])
        key = (device, *map(_dtype, tensors), *constants, *constants.values())
        if self._specialised:
            key += tuple(arguments[place] for place in self._specialised)
        compiled = self._compiled.get(key)
        # Aligned tensors, and whole numbers of 32 bits.
        usual = not reduce(or_, addresses) & _UNALIGNED or not any(
            map(and_, addresses, self._unaligned)
        )
        if numbers and (max(numbers) >= _INT32_END or min(numbers) < -_INT32_END):
            usual = False
        if compiled is None or not usual:
            kernel = self._kernel[grid](*arguments, **constants)
            # Tests without a GPU only record launches: they have no device, or no kernel.
            if usual and device >= 0 and kernel is not None:
                values = tuple(constants[name] for name in self._constants)
                self._compiled[key] = _Compiled(kernel, kernel.run, values)
            return
        kernel, run, values = compiled
        x, y, z = (*grid, 1, 1)[:3]
        stream = driver.active.get_current_stream(device)
        options = kernel.function, kernel.packed_metadata
        no_hooks = None, None, None  # the launch's metadata, which only hooks read, and hooks
        run(x, y, z, stream, *options, *no_hooks, *addresses, *numbers, *values)

    def _inspect(self, arguments: tuple[object, ...]) -> None:
        are_tensors = [isinstance(each, torch.Tensor) for each in arguments]
        count = sum(are_tensors)
        assert all(are_tensors[:count]), "tensors come first"
        self._specialised = [
            place
            for place, (param, each) in enumerate(zip(self._params, arguments, strict=True))
            if type(each) is int and not param.do_not_specialize
        ]
        self._tensors = count  # last: other threads launch by it


def cached_for_gpu(
    constants: Callable[_Arguments, _Constants],
) -> Callable[_Arguments, _Constants]:
    """Compute once what a kernel is compiled with, which depends on the GPU that Triton compiles
    for. Interpreted kernels' are computed each time."""
    if triton.knobs.runtime.interpret:
        return constants

    def of_device(device: object, *arguments: Any, **named: Any) -> _Constants:
        return constants(*arguments, **named)

    computed: Callable[..., _Constants] = cache(of_device)

    @wraps(constants)
    def found(*arguments: _Arguments.args, **named: _Arguments.kwargs) -> _Constants:
        try:
            device = driver.active.get_current_device()
        except RuntimeError:  # there is none
            return constants(*arguments, **named)
        return computed(device, *arguments, **named)

    return found


def cdiv(a: int, b: int) -> int:
    """The quotient, rounded up. ``triton.cdiv`` takes a microsecond."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The least power of two that is at least ``n``, likewise."""
    return 1 << max(0, n - 1).bit_length()
