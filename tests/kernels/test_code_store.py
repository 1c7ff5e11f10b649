"""Compiled kernels on disk: what their names depend on, and who may read them."""

from __future__ import annotations

import ast
import errno
import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tandem.kernels.cpu import jit

if find_spec("numba") is None:
    pytest.skip("numba is not installed", allow_module_level=True)
jit.prepare()

import numba  # noqa: E402

from tandem.kernels.cpu import code_store, exponential  # noqa: E402
from tandem.kernels.cpu.code_store import (  # noqa: E402
    UNUSED_SECONDS,
    KernelCache,
    KernelStore,
    PrivateFiles,
)

COMPILE_ADDRESS = jit.compile_address.__name__
SOURCES = Path(code_store.__file__).parent


def compile_function(store: KernelStore) -> Any:
    """A kernel that has nothing in memory."""
    function = exponential.exp.py_func
    dispatcher = numba.njit(function)
    dispatcher._cache = KernelCache(function, store)
    return dispatcher


def test_installations_with_the_same_sources_share_their_kernels(tmp_path: Path) -> None:
    stores = []
    for name in ("one", "two"):
        shutil.copytree(SOURCES, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
        stores.append(KernelStore(tmp_path / "cache", 0, tmp_path / name))
    one, two = stores
    one.files.create()
    assert one.files.path.stat().st_mode & 0o777 == 0o700
    first, second, third = map(compile_function, (one, two, two))
    assert first(np.float32(1)) == second(np.float32(1)) == pytest.approx(np.e)
    assert [sum(each.stats.cache_hits.values()) for each in (first, second)] == [0, 1]
    # Any source may be part of a kernel.
    with (tmp_path / "two" / "vector.py").open("a") as file:
        file.write("#")
    assert KernelStore(tmp_path / "cache", 0, tmp_path / "two").files.path != one.files.path
    # A process that has imported the former source does not keep its code as that of the new one.
    third(np.float64(1))
    [stored] = [each for each in one.files.path.iterdir() if each.name != code_store._LOCKS]
    assert stored.name.startswith("exp-") and one.is_current() and not two.is_current()


# What claims a name in a process of its own, until its input ends.
CLAIM = """
import fcntl, sys
with open(sys.argv[1], "r+") as file:
    fcntl.lockf(file, fcntl.LOCK_EX, 1, int(sys.argv[2]))
    print("claimed", flush=True)
    sys.stdin.read()
"""


def test_a_name_is_claimed_by_one_process(tmp_path: Path) -> None:
    files = PrivateFiles(tmp_path / "kept")
    assert not files.claim("x", 0)  # there is no folder
    files.create()
    assert files.claim("x", 0) and files.claim("x", 0)
    files.release("x")
    arguments = [str(files.path / code_store._LOCKS), str(code_store._place("x"))]
    with subprocess.Popen(
        [sys.executable, "-c", CLAIM, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout is not None and other.stdout.readline() == "claimed\n"
        assert not files.claim("x", 0) and files.claim("y", 0)
        other.communicate("", timeout=60)
    assert files.claim("x", 0)


def test_code_that_another_process_compiles_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = KernelStore(tmp_path, 0)
    store.create()
    waiting = compile_function(store)

    def wait(files: PrivateFiles, name: str) -> bool:
        monkeypatch.undo()
        compile_function(store)(np.float32(1))
        return True

    monkeypatch.setattr(PrivateFiles, "claim", wait)
    assert waiting(np.float32(1)) == pytest.approx(np.e)
    assert sum(waiting.stats.cache_hits.values()) == 1


class Codegen:
    """A CPU, as numba describes it."""

    def __init__(self, features: str) -> None:
        self.features = features

    def magic_tuple(self) -> tuple[str, ...]:
        return "x86_64", "a", self.features


def test_code_is_named_by_its_signature_and_the_cpu(tmp_path: Path) -> None:
    cache, other = (
        KernelCache(exponential.exp.py_func, KernelStore(tmp_path, 0)) for _ in range(2)
    )
    names = [
        cache._name(signature, Codegen(features))
        for signature in ("float32", "float64")
        for features in ("+avx2", "+avx512f")
    ]
    assert len(set(names)) == 4
    variant = KernelCache(exponential.exp.py_func, KernelStore(tmp_path, 0), "x")
    assert variant._name("float32", Codegen("+avx2")) not in names
    assert other._name("float32", Codegen("+avx2")) == names[0]


@pytest.mark.parametrize(
    "change",
    [
        lambda patch: patch.setattr("numba.__version__", "9"),
        lambda patch: patch.setattr("llvmlite.__version__", "9"),
        lambda patch: patch.setattr("numpy.__version__", "9"),
        lambda patch: patch.setattr("sys.version", "9"),
        lambda patch: patch.setattr(code_store, "__package__", "other.kernels.cpu"),
    ],
    ids=["numba", "llvmlite", "numpy", "python", "package"],
)
def test_each_version_has_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[pytest.MonkeyPatch], None]
) -> None:
    before = KernelStore(tmp_path, 0)
    assert KernelStore(tmp_path, 0).files.path == before.files.path
    assert KernelStore(tmp_path, 1).files.path != before.files.path
    change(monkeypatch)
    assert KernelStore(tmp_path, 0).files.path != before.files.path
    # What this process compiles is of the version that it began with, or is not kept.
    assert not before.is_current()


def test_a_new_folder_replaces_those_that_have_fallen_out_of_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "tandem"
    unused, used, new = (KernelStore(root, number) for number in range(3))
    for store in (unused, used):
        store.create()
        store.files.write("x", b"code")
    (root / "others").mkdir()
    (root / "kernels-elsewhere").symlink_to(tmp_path)
    long_ago = time.time() - UNUSED_SECONDS - 60
    for path in root.iterdir():
        os.utime(path, (long_ago, long_ago), follow_symlinks=False)
    used.create()  # as at each start, which removes nothing
    assert unused.files.read("x") == b"code"
    new.create()
    names = {path.name for path in root.iterdir()}
    expected = {used.files.path.name, new.files.path.name, "others", "kernels-elsewhere"}
    assert names == expected
    assert used.files.read("x") == b"code" and unused.files.read("x") is None
    unused.files.write("x", b"code")  # by a process that has begun with it
    assert not unused.files.path.exists()
    unused.create()
    assert used.files.path.exists()
    # A folder of another user is left alone.
    os.utime(used.files.path, (long_ago, long_ago))
    monkeypatch.setattr("os.geteuid", lambda: os.getuid() + 1)
    code_store._remove_unused(root)
    assert used.files.path.exists()


def test_what_is_not_whole_is_not_there(tmp_path: Path) -> None:
    files = PrivateFiles(tmp_path / "a" / "kept")
    files.write("x", b"lost")
    assert files.read("x") is None
    files.create()
    files.write("x", b"code")
    assert files.read("x") == b"code" and files.read("y") is None
    file = files.path / "x"
    file.write_bytes(file.read_bytes()[:-1])
    assert files.read("x") is None
    files.write("x", b"again")
    assert files.read("x") == b"again" and [each.name for each in files.path.iterdir()] == ["x"]


@pytest.mark.parametrize("how", ["a link", "readable by others", "another user's", "a file"])
def test_a_folder_that_another_user_may_have_made_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = KernelStore(tmp_path / "tandem", jit.WIDE).files.path
    path.parent.mkdir()
    if how == "a link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        path.symlink_to(tmp_path / "elsewhere")
    elif how == "a file":
        path.touch()
    else:
        path.mkdir(mode=0o700 if how == "another user's" else 0o755)
        (path / "x").write_bytes(b"planted")
    if how == "another user's":
        monkeypatch.setattr("os.geteuid", lambda: os.getuid() + 1)
    with caplog.at_level(logging.WARNING, "tandem.kernels"):
        assert jit._store.__wrapped__() is None
    assert "kernels are compiled at each start" in caplog.text
    files = PrivateFiles(path)
    files.write("y", b"code")
    assert files.read("x") is None and not (path / "y").exists()


def test_a_user_without_a_home_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    assert jit._store.__wrapped__() is None


def test_kernels_contain_nothing_from_outside_their_folder() -> None:
    """Their version has the sources of this folder alone."""
    wrong = []
    for file in sorted(SOURCES.glob("*.py")):
        tree = ast.parse(file.read_text())
        outside = {
            alias.asname or alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.level > 1
            for alias in node.names
        }
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        by_address = {
            ast.unparse(call.args[0]) for call in calls if ast.unparse(call.func) == COMPILE_ADDRESS
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and (
                node.name in by_address or any(map(is_compiled, node.decorator_list))
            ):
                body = [part for each in node.body for part in ast.walk(each)]
                used = {part.id for part in body if isinstance(part, ast.Name)}
                wrong += [f"{file.name}: {node.name} has {name}" for name in used & outside]
    assert wrong == []


def is_compiled(decorator: ast.expr) -> bool:
    name = decorator.func if isinstance(decorator, ast.Call) else decorator
    return isinstance(name, ast.Name) and name.id in ("kernel", "intrinsic")


def test_a_full_disk_keeps_nothing_and_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    files = PrivateFiles(tmp_path / "kept")
    files.create()

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(code_store.os, "replace", full)
        for name in "ab":
            files.write(name, b"code")
    assert list(files.path.iterdir()) == [] and files.read("a") is None
    [message] = [record.getMessage() for record in caplog.records]
    assert str(files.path) in message and "No space left" in message and "XDG_CACHE_HOME" in message
    files.write("a", b"code")
    assert files.read("a") == b"code"
