"""The wheel holds every module and all package data, and nothing of tests, tools or deployment."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = (
    "bench",
    "client",
    "commands",
    "inventory",
    "router",
    "prefill_node",
    "decode_node",
    "shared",
    "kernels",
    "proto",
)
FILES = ("__init__.py", "__main__.py", "py.typed", "pyproject.toml", "README.md")


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Built in a copy: setuptools leaves a build folder beside its sources."""
    copy = tmp_path_factory.mktemp("source")
    for folder in FOLDERS:
        shutil.copytree(
            ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__", "*.pyc")
        )
    for file in FILES:
        shutil.copy(ROOT / file, copy / file)
    for folder in ("tests", "tools"):
        (copy / folder).mkdir()
        (copy / folder / "nothing.py").touch()
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", "out", "."]
    done = subprocess.run(build, cwd=copy, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (wheel,) = (copy / "out").glob("*.whl")
    return set(zipfile.ZipFile(wheel).namelist())


def test_every_module_is_inside(names: set[str]) -> None:
    modules = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    expected = {f"tandem/{path.relative_to(ROOT)}" for path in modules}
    assert expected | {"tandem/__init__.py", "tandem/__main__.py"} <= names


@pytest.mark.parametrize(
    "data",
    [
        "py.typed",
        "bench/report/plot.html",
        "proto/tandem.proto",
        "proto/tandem_pb2.pyi",
        "router/web/page/index.html",
        "router/web/page/chat/chat_view.js",
        "shared/builtin_model/weights/config.json",
        "shared/builtin_model/weights/generation_config.json",
        "shared/builtin_model/weights/model.safetensors",
        "shared/builtin_model/weights/tokenizer.json",
        "shared/builtin_model/weights/tokenizer_config.json",
    ],
)
def test_package_data_is_inside(names: set[str], data: str) -> None:
    assert f"tandem/{data}" in names


def test_nothing_else_is_inside(names: set[str]) -> None:
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"tandem"}
    inside = {name.split("/")[1] for name in names if name.startswith("tandem/")}
    assert inside == {*FOLDERS, "__init__.py", "__main__.py", "py.typed"}
