"""Compiled kernels on disk, shared by all installations of a user that have the same kernels.

numba's own cache has a folder for each source path, so every clone compiles again. Its index of a
function's signatures is read, modified and written: two processes that compile at once may store
one signature with the code of another. Here a file's name covers everything that its code depends
on: the sources of all kernels, since a kernel contains the kernels that it calls; versions of
Python, numba, LLVM and numpy; the signature; the CPU with its features.

The nodes of a host start together and need the same kernels, so each is compiled by one process,
for which the others wait.

Unpickling files runs code in them. They are therefore in a folder that only its user can change,
and are accessed through its descriptor, so a process that can rename the folder cannot replace it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import pickle
import secrets
import shutil
import stat
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import llvmlite
import numba
import numpy as np
from numba.core.compiler import CompileResult
from numba.core.serialize import dumps

log = logging.getLogger("tandem.kernels")

# Each update of Tandem, numba or Python creates a new folder of a few megabytes.
UNUSED_SECONDS = 30 * 24 * 3600.0
_DIGEST_BYTES = hashlib.sha256().digest_size
# The longest wait for another process's code: several times what the largest kernel takes.
_WAIT_SECONDS = 60.0
_POLL_SECONDS = 0.05
_LOCKS = ".locks"


class PrivateFiles:
    """Named bytes in a folder that only this user can change."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._warned = False
        # Stays open: closing any descriptor of the file would end all of the process's locks.
        self._locks: int | None = None

    def create(self) -> bool:
        """Create the folder, and note its use. True if it is new. Raises ``OSError`` if that fails,
        or if others can change it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self.path.mkdir(mode=0o700)
            new = True
        except FileExistsError:
            new = False
        with self._opened() as folder:
            os.utime(folder)
        return new

    def read(self, name: str) -> bytes | None:
        """The bytes of a name, if they exist and are intact."""
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            with self._opened() as at, os.fdopen(os.open(name, flags, dir_fd=at), "rb") as file:
                data = file.read()
        except OSError:
            return None
        digest, content = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
        return content if hashlib.sha256(content).digest() == digest else None

    def write(self, name: str, content: bytes) -> None:
        """Store bytes under a name. Failures, such as a full disk, are logged once."""
        unfinished = f".{secrets.token_hex(8)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            with self._opened() as folder:
                try:
                    with os.fdopen(os.open(unfinished, flags, 0o600, dir_fd=folder), "wb") as file:
                        file.write(hashlib.sha256(content).digest() + content)
                    os.replace(unfinished, name, src_dir_fd=folder, dst_dir_fd=folder)
                except OSError:
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(unfinished, dir_fd=folder)
                    raise
        except OSError as error:
            if not self._warned:
                self._warned = True
                log.warning(
                    "%s: %s: compiled kernels are not stored, so each start compiles them again; "
                    "free space there, or set XDG_CACHE_HOME to another folder",
                    self.path,
                    error.strerror or error,
                )

    def claim(self, name: str, wait_seconds: float = _WAIT_SECONDS) -> bool:
        """Wait until no other process has claimed a name. False if that takes too long, or locks
        are not available. Claims end with ``release`` or the process."""
        try:
            if self._locks is None:
                flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
                with self._opened() as folder:
                    self._locks = os.open(_LOCKS, flags, 0o600, dir_fd=folder)
            deadline = time.monotonic() + wait_seconds
            while True:
                try:
                    fcntl.lockf(self._locks, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _place(name))
                    return True
                except (BlockingIOError, PermissionError):  # either, by POSIX
                    if time.monotonic() > deadline:
                        return False
                time.sleep(_POLL_SECONDS)
        except OSError:
            return False

    def release(self, name: str) -> None:
        """End this process's claim of a name, if there is one."""
        if self._locks is not None:
            with contextlib.suppress(OSError):
                fcntl.lockf(self._locks, fcntl.LOCK_UN, 1, _place(name))

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int]:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        folder = os.open(self.path, flags)
        try:
            status = os.fstat(folder)
            if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
                raise PermissionError(f"{self.path} is not a folder that only this user can change")
            yield folder
        finally:
            os.close(folder)


def _place(name: str) -> int:
    """The byte of the file of locks that stands for a name."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")


class KernelStore:
    """The compiled code of all kernels, for the sources that this process imported."""

    def __init__(self, root: Path, settings: object, sources: Path = Path(__file__).parent) -> None:
        """``settings`` are what the code depends on besides the files in ``sources``."""
        self._settings = settings
        self._sources = sources
        self._version = self._current()
        self.files = PrivateFiles(root / f"kernels-{self._version}")

    def create(self) -> None:
        """Create the folder of this version; if it is new, remove unused folders. Raises
        ``OSError``."""
        if self.files.create():
            _remove_unused(self.files.path.parent)

    def is_current(self) -> bool:
        """True while the sources are still those that this process has imported."""
        return self._current() == self._version

    def _current(self) -> str:
        versions = (sys.version, numba.__version__, llvmlite.__version__, np.__version__)
        digest = hashlib.sha256(repr((__package__, versions, self._settings)).encode())
        for file in sorted(self._sources.glob("*.py")):
            digest.update(file.read_bytes())
        return digest.hexdigest()[:32]


def _remove_unused(root: Path) -> None:
    """Remove the folders of versions that no process has begun to use for ``UNUSED_SECONDS``.

    A process that has run for longer has its code in memory; missing files are compiled again and
    not stored. Several processes may remove the same folders.
    """
    for path in root.glob("kernels-*"):
        with contextlib.suppress(OSError):
            status = path.lstat()
            mine = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
            if mine and time.time() - status.st_mtime > UNUSED_SECONDS:
                shutil.rmtree(path)


class KernelCache:
    """The compiled code of one function, for numba's dispatcher."""

    def __init__(self, function: Callable[..., Any], store: KernelStore, variant: str = "") -> None:
        """``variant`` distinguishes functions that the same lines define."""
        self._function = function
        self._store = store
        self._variant = variant
        self.cache_path = str(store.files.path)

    def load_overload(self, signature: Any, target: Any) -> Any:
        """The result of compiling for a signature, if it was saved. Otherwise no other process
        compiles for it until ``save_overload``."""
        target.refresh()
        files, name = self._store.files, self._name(signature, target.codegen())
        content = files.read(name)
        if content is None and files.claim(name):
            content = files.read(name)  # saved in the meantime
            if content is not None:
                files.release(name)
        if content is None:
            return None
        return CompileResult._rebuild(target, *pickle.loads(content))  # noqa: S301 (of this user)

    def save_overload(self, signature: Any, result: Any) -> None:
        """Save a result, unless it contains addresses of this process."""
        lasting = not result.library.has_dynamic_globals and not result.lifted
        name = self._name(signature, result.codegen)
        if lasting and self._store.is_current():
            self._store.files.write(name, dumps(result._reduce()))
        self._store.files.release(name)

    def _name(self, signature: Any, codegen: Any) -> str:
        function = self._function
        place = (function.__module__, function.__qualname__, function.__code__.co_firstlineno)
        key = repr((place, self._variant, signature, codegen.magic_tuple()))
        return f"{function.__name__}-{hashlib.sha256(key.encode()).hexdigest()}"
