"""Kernels that others call by their address.

numba puts the code of a kernel into each kernel that calls it by name, and optimises and compiles
it there again: three times for a parallel loop. The first start would wait for that. A kernel that
a loop calls for each task is compiled once instead.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import typeof
from numba.core import cgutils, types
from numba.extending import intrinsic

# The address of a compiled kernel, and a number of its arguments' types.
Callee = tuple[int, int]


def callee_of(kernel: Any, *arguments: Any) -> Callee:
    """A kernel, compiled for arguments of these types. It must return nothing."""
    kinds = tuple(map(typeof, arguments))
    kernel.compile(kinds)
    result = kernel.overloads[kinds]
    address = result.library.get_pointer_to_function(result.fndesc.llvm_func_name)
    return address, _number_of(kinds)


@intrinsic
def call_callee(typing: Any, callee: Any, arguments: Any) -> Any:
    """Call a kernel. Raises ``TypeError`` if the arguments are not of the types that it was
    compiled for."""
    kinds = tuple(map(types.unliteral, arguments))  # type: ignore[attr-defined]
    signature = types.void(callee, types.Tuple(kinds))  # type: ignore[attr-defined]

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address, number = cgutils.unpack_tuple(builder, args[0])
        wrong = builder.icmp_signed("!=", number, ir.Constant(number.type, _number_of(kinds)))
        convention = context.call_conv
        with cgutils.if_unlikely(builder, wrong):
            text = f"a kernel was not compiled for {kinds}"
            convention.return_user_exc(builder, TypeError, (text,))
        kind = convention.get_function_type(types.none, kinds)
        status, _ = convention.call_function(
            builder,
            builder.inttoptr(address, kind.as_pointer()),
            types.none,
            kinds,
            cgutils.unpack_tuple(builder, args[1]),
        )
        with cgutils.if_unlikely(builder, status.is_error):
            convention.return_status_propagate(builder, status)
        return context.get_dummy_value()

    return signature, generate


def _number_of(kinds: Sequence[Any]) -> int:
    digest = hashlib.sha256(repr(kinds).encode()).digest()
    return int.from_bytes(digest[:8], "big", signed=True)
