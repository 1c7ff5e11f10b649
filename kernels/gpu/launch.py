"""Launches of compiled kernels without Triton's look-up.

At each launch Triton binds the arguments and looks up what it has compiled for them, which takes
longer than many kernels: a step that is launched kernel by kernel waits for the host. ``direct``
asks Triton once, and then launches the same compiled kernel for all arguments for which Triton
would find it. Addresses are passed as numbers, for which Triton does not ask the driver.
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

# Kernels for addresses that are multiples of 16 are compiled apart.
_UNALIGNED = 15
_INT32_END = 1 << 31
_Arguments = ParamSpec("_Arguments")
_Constants = TypeVar("_Constants")
# What a launch asks of a tensor.
_address: Callable[[torch.Tensor], int] = torch.Tensor.data_ptr
_dtype = attrgetter("dtype")
_device: Callable[[torch.Tensor], int] = torch.Tensor.get_device


class _Compiled(NamedTuple):
    """What launches a kernel that Triton has compiled, and the values of its constants."""

    kernel: Any
    run: Callable[..., object]
    constants: tuple[object, ...]


def direct(kernel: Any) -> Any:
    """A kernel that is launched like ``kernel``, in less time. Tensors come first among its
    arguments, then numbers, and then constants, by name. An interpreted kernel stays as it is.
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
        # Of each argument, the bits that are zero in an address if it is aligned.
        self._unaligned = [
            0 if each.do_not_specialize or each.do_not_specialize_on_alignment else _UNALIGNED
            for each in self._params
        ]
        # Once launched: the number of tensors, and the places of numbers that count.
        self._tensors = 0
        self._valued: list[int] = []
        self._compiled: dict[tuple[object, ...], _Compiled] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        if not self._tensors:
            self._inspect(arguments)
        tensors, numbers = arguments[: self._tensors], arguments[self._tensors :]
        addresses, device = [*map(_address, tensors)], _device(tensors[0])
        key = (device, *map(_dtype, tensors), *constants, *constants.values())
        if self._valued:
            key += tuple(arguments[place] for place in self._valued)
        compiled = self._compiled.get(key)
        # Aligned tensors, and whole numbers of 32 bits.
        usual = not reduce(or_, addresses) & _UNALIGNED or not any(
            map(and_, addresses, self._unaligned)
        )
        if numbers and (max(numbers) >= _INT32_END or min(numbers) < -_INT32_END):
            usual = False
        if compiled is None or not usual:
            kernel = self._kernel[grid](*arguments, **constants)
            # Not one that is only recorded, without a device.
            if usual and device >= 0 and kernel is not None:
                values = tuple(constants[name] for name in self._constants)
                self._compiled[key] = _Compiled(kernel, kernel.run, values)
            return
        kernel, run, values = compiled
        x, y, z = (*grid, 1, 1)[:3]
        stream = driver.active.get_current_stream(device)
        options = kernel.function, kernel.packed_metadata
        run(x, y, z, stream, *options, None, None, None, *addresses, *numbers, *values)

    def _inspect(self, arguments: tuple[object, ...]) -> None:
        are_tensors = [isinstance(each, torch.Tensor) for each in arguments]
        self._tensors = sum(are_tensors)
        assert all(are_tensors[: self._tensors]), "tensors come first"
        self._valued = [
            place
            for place, (param, each) in enumerate(zip(self._params, arguments, strict=True))
            if type(each) is int and not param.do_not_specialize
        ]


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
