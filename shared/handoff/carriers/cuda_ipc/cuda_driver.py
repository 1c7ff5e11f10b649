"""CUDA's driver through ctypes: memory that other processes can open, and copies out of theirs.

torch cannot do this: its allocator hands out parts of larger segments, some of which cannot be
exported, and it shares tensors with pickle and reference counts in files. Everything here uses the
device's primary context, as torch does.
"""

from __future__ import annotations

import ctypes
import uuid
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any

from ..device import DeviceError

LIBRARY = "libcuda.so.1"
HANDLE_BYTES = 64
# Smaller allocations share a block of this size, and a handle is always for the whole block.
_ALLOCATION = 2 << 20
_LAZY_ENABLE_PEER_ACCESS = 1
_HOST_REGISTER_PORTABLE = 1


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_ubyte * HANDLE_BYTES)]


class _Uuid(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_ubyte * 16)]


# As in cuda.h, in the versions that its macros select.
_PROTOTYPES: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuGetErrorString": (c_int, POINTER(c_char_p)),
    "cuDriverGetVersion": (POINTER(c_int),),
    "cuDeviceGetCount": (POINTER(c_int),),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetUuid_v2": (POINTER(_Uuid), c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuDevicePrimaryCtxRelease_v2": (c_int,),
    "cuCtxSetCurrent": (c_void_p,),
    "cuStreamSynchronize": (c_void_p,),
    "cuMemAlloc_v2": (POINTER(c_uint64), c_size_t),
    "cuMemFree_v2": (c_uint64,),
    "cuMemGetAddressRange_v2": (POINTER(c_uint64), POINTER(c_size_t), c_uint64),
    "cuMemcpyDtoDAsync_v2": (c_uint64, c_uint64, c_size_t, c_void_p),
    "cuIpcGetMemHandle": (POINTER(_Handle), c_uint64),
    "cuIpcOpenMemHandle_v2": (POINTER(c_uint64), _Handle, c_uint),
    "cuIpcCloseMemHandle": (c_uint64,),
    "cuMemHostRegister_v2": (c_void_p, c_size_t, c_uint),
    "cuMemHostUnregister": (c_void_p,),
}


def device_count(library: str = LIBRARY) -> int:
    """The number of GPUs visible to this process, by torch's count: the driver respects
    ``CUDA_VISIBLE_DEVICES``. 0 without a driver. Allocates nothing on any GPU."""
    count = c_int()
    try:
        driver = _load(library)
    except DeviceError:
        return 0
    failed = driver.cuInit(0) or driver.cuDeviceGetCount(byref(count))
    return 0 if failed else count.value


def cuda_of_driver(library: str = LIBRARY) -> tuple[int, int]:
    """The newest version of CUDA that the driver supports, such as (12, 8). Raises
    ``DeviceError``."""
    version = c_int()
    if _load(library).cuDriverGetVersion(byref(version)):
        raise DeviceError("the CUDA driver does not tell its version")
    return version.value // 1000, version.value % 1000 // 10


class CudaDriver:
    """A ``DeviceDriver`` of one GPU."""

    def __init__(self, ordinal: int, library: str = LIBRARY) -> None:
        """``ordinal`` is the GPU's number among those visible to this process. Raises
        ``DeviceError``."""
        self._library = _load(library)
        self._context = c_void_p()
        self._stream = c_void_p()
        self._device = c_int()
        self._call("cuInit", 0)
        self._call("cuDeviceGet", byref(self._device), ordinal)
        raw = _Uuid()
        self._call("cuDeviceGetUuid_v2", byref(raw), self._device)
        self.identity = f"GPU-{uuid.UUID(bytes=bytes(raw.bytes))}"

    def _call(self, name: str, *arguments: Any, what: str = "") -> None:
        """Call a function of the driver. Raises ``DeviceError``, which mentions ``what``."""
        code = getattr(self._library, name)(*arguments)
        if code:
            reason = f"{self._text('cuGetErrorName', code)}, {self._text('cuGetErrorString', code)}"
            raise DeviceError(f"{name}{what and f' of {what}'} failed: {reason}")

    def _text(self, name: str, code: int) -> str:
        text = c_char_p()
        getattr(self._library, name)(code, byref(text))
        return text.value.decode() if text.value else f"error {code}"

    def enter(self, stream: int) -> None:
        self._call("cuDevicePrimaryCtxRetain", byref(self._context), self._device)
        self._call("cuCtxSetCurrent", self._context)
        self._stream = c_void_p(stream)

    def leave(self) -> None:
        self._call("cuDevicePrimaryCtxRelease_v2", self._device)

    def allocate(self, size: int) -> int:
        address = c_uint64()
        whole = -(-size // _ALLOCATION) * _ALLOCATION
        self._call("cuMemAlloc_v2", byref(address), whole, what=f"{whole} bytes")
        return address.value

    def free(self, address: int) -> None:
        self._call("cuMemFree_v2", address)

    def export(self, address: int) -> bytes:
        handle = _Handle()
        self._call("cuIpcGetMemHandle", byref(handle), address)
        return bytes(handle.reserved)

    def open(self, handle: bytes, size: int) -> int:
        if len(handle) != HANDLE_BYTES:
            raise DeviceError(f"a handle of {len(handle)} bytes, not {HANDLE_BYTES}")
        address = c_uint64()
        self._call(
            "cuIpcOpenMemHandle_v2",
            byref(address),
            _Handle.from_buffer_copy(handle),
            _LAZY_ENABLE_PEER_ACCESS,
        )
        try:
            self._check_size(address.value, size)
        except DeviceError:
            self.close(address.value)
            raise
        return address.value

    def _check_size(self, address: int, size: int) -> None:
        base, length = c_uint64(), c_size_t()
        self._call("cuMemGetAddressRange_v2", byref(base), byref(length), address)
        there = base.value + length.value - address
        if there < size:
            raise DeviceError(f"the handle is for {there} bytes, not {size}")

    def close(self, address: int) -> None:
        self._call("cuIpcCloseMemHandle", address)

    def copy(self, into: int, source: int, length: int) -> None:
        self._call("cuMemcpyDtoDAsync_v2", into, source, length, self._stream)

    def settle(self) -> None:
        self._call("cuStreamSynchronize", self._stream)

    def array(self, address: int, size: int) -> Any:
        return _Array(address, size)

    def pin(self, address: int, size: int) -> None:
        flags = _HOST_REGISTER_PORTABLE
        self._call("cuMemHostRegister_v2", address, size, flags, what=f"{size} bytes")

    def unpin(self, address: int) -> None:
        self._call("cuMemHostUnregister", address)


class _Array:
    """Bytes on the device, by CUDA's array interface."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def _load(name: str) -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(name)
        for function, arguments in _PROTOTYPES.items():
            getattr(library, function).argtypes = arguments
    except (OSError, AttributeError) as error:
        raise DeviceError(f"there is no usable CUDA driver: {error}") from None
    return library
