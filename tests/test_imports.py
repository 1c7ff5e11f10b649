"""What a process must not load, how modules import, and what they must not call. pyproject.toml has
the order of imports."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tandem.tests.support.checkpoints import tiny_models
from tandem.tests.support.checkpoints.gguf_files import write_gguf

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
MODULES = sorted(
    path.relative_to(ROOT) for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")
)
WEB = ("fastapi", "uvicorn", "starlette", "grpc", "prometheus_client")


@cache
def text(module: Path) -> str:
    return (ROOT / module).read_text()


def nodes(module: Path, *words: str) -> list[ast.AST]:
    """The imports and calls of a module that has one of these words; of another one, nothing: most
    modules need not be parsed."""
    if not re.search(rf"\b({'|'.join(words)})\b", text(module)):
        return []
    node_types = (ast.Import, ast.ImportFrom, ast.Call)
    return [node for node in ast.walk(ast.parse(text(module))) if isinstance(node, node_types)]


def within(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


def test_imports_across_folders_are_relative() -> None:
    wrong = []
    absolute = rf"(import|from) +([\w.]+( as \w+)?, *)*({'|'.join(('tandem', *FOLDERS))})"
    for module in MODULES:
        for node in nodes(module, absolute):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            own = f"tandem.{module.parts[0]}"
            ours = [n for n in names if within(n, "tandem", *FOLDERS) and not within(n, own)]
            wrong += [f"{module}: {name}" for name in ours]
    assert wrong == []


# By module, what a process that imports it must not load. The last two import torch.
ABSENT: dict[str, set[str]] = {
    "tandem.router.server": {"torch", "transformers", "triton"},
    "tandem.shared.text.tokenizer": {"torch", "transformers", "triton"},
    "tandem.shared.engine.api.engine": {*WEB, "torch", "transformers"},
    "tandem": {"torch", "numpy", "grpc", "click", "asyncio", "tandem.shared"},
    "tandem.bench.serving, tandem.bench.interfering": {"torch", "numpy", "grpc", "rich"},
    "tandem.__main__": {"torch", "numpy", "grpc", "fastapi"},
    "tandem.shared.engine.rank.loading": {*WEB, "transformers", "torch._dynamo", "numba", "triton"},
    "tandem.shared.engine.rank.runner": {"msgpack", "msgspec", "zmq", "grpc", "pydantic"},
}
# Prints a line for each argument: what an interpreter has loaded that imports this. Each is a fork,
# so that nothing is loaded before; torch itself is imported once, for the arguments after it.
LOAD = """
import os, sys
for module in sys.argv[1:]:
    if module == "torch":
        import torch
    elif not os.fork():
        exec("import " + module)
        print(*sys.modules, flush=True)
        os._exit(0)
    else:
        assert os.wait()[1] == 0, module
"""


@pytest.fixture(scope="module")
def loaded_modules() -> dict[str, set[str]]:
    """By module, what a process that imports it has loaded."""
    *others, loading, runner = ABSENT
    command = [sys.executable, "-P", "-c", LOAD, *others, "torch", loading, runner]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    lines = done.stdout.splitlines()
    return {name: set(line.split()) for name, line in zip(ABSENT, lines, strict=True)}


@pytest.mark.parametrize("module", ABSENT)
def test_a_process_does_not_load(module: str, loaded_modules: dict[str, set[str]]) -> None:
    assert module.partition(",")[0] in loaded_modules[module]
    assert loaded_modules[module] & ABSENT[module] == set()


def test_a_router_reads_a_gguf_file_without_numpy(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write_gguf(tiny_models.cached("qwen3", tmp_path / "model"), file)
    code = (
        "import sys; from tandem.router.cluster import pinned_model; "
        "from tandem.shared.weights.source import open_source, read_spec; "
        "from tandem.shared.text.tokenizer import Tokenizer; "
        f"read_spec({str(file)!r}); Tokenizer.load(open_source({str(file)!r}).tokenizer_files()); "
        "print(*sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    absent = {"torch", "numpy", "transformers", "safetensors", "gguf"}
    assert set(done.stdout.split()) & absent == set()


# What the base dependencies of pyproject.toml do not bring, and an engine alone must not ask for.
EXTRAS = (
    "click",
    "fastapi",
    "grpc",
    "httptools",
    "prometheus_client",
    "rich",
    "uvicorn",
    "xxhash",
    "zmq",
)
GENERATE = """
from tandem import Engine, EngineConfig, SamplingParams
config = EngineConfig(model="builtin", threads=1, num_blocks=64, max_model_len=512)
with Engine(config) as engine:
    print(engine.generate_sync(["Hello"], SamplingParams(max_tokens=2))[0][0].tokens)
"""


def test_the_engine_alone_runs_without_the_extras(tmp_path: Path) -> None:
    for name in EXTRAS:
        (tmp_path / f"{name}.py").write_text(f"raise ModuleNotFoundError({name!r})\n")
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        [sys.executable, "-P", "-c", GENERATE],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0 and done.stdout.strip(), done.stderr


def _unsafe(module: Path) -> Iterator[str]:
    """Pickle in any guise, ``torch.load``, ``eval`` and ``exec``."""
    formats = ("pickle", "cPickle", "dill", "shelve", "marshal")
    functions = ("eval", "exec", "torch.load", "np.load", "numpy.load", "yaml.load")
    for node in nodes(module, *formats, *functions):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        else:
            names = []
        yield from (name for name in names if within(name, *formats))
        if isinstance(node, ast.Call) and (function := ast.unparse(node.func)) in functions:
            yield function


def test_no_file_and_no_peer_can_run_code() -> None:
    modules = [*MODULES, Path("__init__.py"), Path("__main__.py")]
    uses = {str(m): list(_unsafe(m)) for m in modules}
    # Compiled kernels are code in any form; only their user can change their folder.
    allowed = {"kernels/cpu/code_store.py": ["pickle"]}
    assert {name: functions for name, functions in uses.items() if functions} == allowed
