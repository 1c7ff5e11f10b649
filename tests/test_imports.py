"""The order of imports that ARCHITECTURE.md shows, and what a process must not load."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
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

ALLOWED = {
    "bench": ("shared", "commands"),
    "proto": (),
    "kernels": (),
    "shared": ("kernels", "proto", "shared"),
    "commands": ("shared.config", "shared.errors"),
    "inventory": ("shared",),
    "client": ("shared.config", "shared.errors", "shared.host_port", "shared.process"),
    "prefill_node": ("prefill_node", "shared", "proto"),
    "decode_node": ("decode_node", "shared", "proto"),
    "router": (
        "router",
        "proto",
        "shared.causes",
        "shared.errors",
        "shared.version",
        "shared.unix_sockets",
        "shared.host_port",
        "shared.config",
        "shared.text",
        "shared.security",
        "shared.process",
        "shared.telemetry",
        "shared.models.fingerprint",
        "shared.weights.locate",
        "shared.weights.source",
        "shared.kv.prefix_keys",
        "shared.handoff.carriers.tcp",
    ),
}
# Inside shared/, each may import those before it, and itself.
ORDER: tuple[tuple[str, ...], ...] = (
    ("causes",),
    ("errors", "version"),
    ("unix_sockets",),
    ("host_port",),
    ("config",),
    ("text",),
    ("security",),
    ("process",),
    ("telemetry",),
    ("builtin_model",),
    (
        "models.spec",
        "models.weight_names",
        "models.model_config",
        "models.config",
        "models.no_effect",
        "models.kinds",
        "models.quantization",
        "models.families",
        "models.registry",
        "models.fingerprint",
    ),
    ("kv",),
    ("models",),
    ("weights",),
    ("handoff",),
    ("engine",),
    ("node",),
    ("launch",),
)
# What each folder of router/ may import of router/, besides itself. The modules at its root serve
# requests with all of them.
ROUTER = {
    "access": ("errors", "http", "options"),
    "anthropic": (
        "errors",
        "generation",
        "http",
        "openai",
        "options",
        "requests",
        "result",
        "served_model",
        "surface",
        "usage",
    ),
    "batches": (
        "access",
        "database",
        "errors",
        "generation",
        "handler",
        "http",
        "openai",
        "options",
        "requests",
        "served_model",
        "surface",
    ),
    "calls": ("errors",),
    "cluster": ("calls", "errors", "options", "placement", "served_model"),
    "doctor": ("cluster",),
    "embeddings": (
        "errors",
        "generation",
        "options",
        "requests",
        "result",
        "served_model",
        "surface",
    ),
    "http": ("errors", "options", "usage"),
    "ollama": (
        "embeddings",
        "errors",
        "generation",
        "http",
        "openai",
        "options",
        "requests",
        "result",
        "served_model",
        "surface",
        "usage",
    ),
    "mcp": (
        *("database", "errors", "generation", "http", "openai", "options", "requests"),
        *("result", "served_model", "state"),
    ),
    "openai": (
        *("calls", "errors", "generation", "http", "options", "requests", "result"),
        *("served_model", "surface", "usage"),
    ),
    "placement": (),
    "requests": ("errors", "http", "options", "served_model"),
    "responses": (
        "access",
        "database",
        "errors",
        "generation",
        "handler",
        "http",
        "mcp",
        "openai",
        "options",
        "requests",
        "result",
        "served_model",
        "state",
        "surface",
        "usage",
    ),
    "beams": (
        "calls",
        "choice",
        "cluster",
        "dispatch",
        "echo",
        "errors",
        "generation",
        "node_request",
        "usage",
    ),
    # The routes are above everything but the application.
    "routes": (
        "access",
        "anthropic",
        "batches",
        "cluster",
        "embeddings",
        "errors",
        "generation",
        "handler",
        "http",
        "mcp",
        "ollama",
        "openai",
        "options",
        "requests",
        "responses",
        "served_model",
        "surface",
        "telemetry",
        "tokenization",
        "web",
    ),
    "telemetry": ("cluster", "generation", "http", "usage"),
    "tokenization": ("generation", "http", "openai", "requests", "served_model"),
    "web": ("cluster", "placement"),
}
WEB = ("fastapi", "uvicorn", "starlette", "grpc", "prometheus_client")


@cache
def nodes(module: Path) -> list[ast.AST]:
    """The imports and calls of a module, which many tests look at."""
    tree = ast.parse((ROOT / module).read_text())
    wanted = (ast.Import, ast.ImportFrom, ast.Call)
    return [node for node in ast.walk(tree) if isinstance(node, wanted)]


@cache
def imports(module: Path) -> tuple[str, ...]:
    """Absolute names of everything that a module imports; ours start with ``tandem.``."""
    return tuple(_imports(module))


def _imports(module: Path) -> Iterator[str]:
    package = ("tandem", *module.with_suffix("").parts[:-1])
    for node in nodes(module):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            origin = ".".join((*base, *(node.module or "").split("."))).strip(".")
            yield from (f"{origin}.{alias.name}" for alias in node.names)


def within(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


def outside(module: Path) -> list[str]:
    """Imports of ours that the module's folder may not use."""
    folder = module.parts[0]
    allowed = [f"tandem.{name}" for name in (*ALLOWED[folder], folder)]
    return [n for n in imports(module) if within(n, "tandem") and not within(n, *allowed)]


@pytest.mark.parametrize("folder", FOLDERS)
def test_folders_import_only_what_they_may(folder: str) -> None:
    modules = [module for module in MODULES if module.parts[0] == folder]
    assert modules
    assert {str(m): bad for m in modules if (bad := outside(m))} == {}


def test_what_every_request_passes_knows_no_tools_of_servers_and_no_responses() -> None:
    apart = ("tandem.router.mcp", "tandem.router.responses")
    passed = [m for m in MODULES if m.parent == Path("router") and m.stem not in ("app", "server")]
    assert Path("router/handler.py") in passed
    assert {
        str(m): bad for m in passed if (bad := [n for n in imports(m) if within(n, *apart)])
    } == {}


def test_no_modules_import_each_other() -> None:
    """Not even on demand, or for type hints."""
    modules = {".".join(("tandem", *m.with_suffix("").parts)): m for m in MODULES}
    sorter = TopologicalSorter[str]()
    for name, module in modules.items():
        for imported in imports(module):
            sorter.add(name, *({imported, imported.rpartition(".")[0]} & modules.keys() - {name}))
    sorter.prepare()  # raises CycleError, which names the modules of a circle


def tier(name: str) -> int:
    """The position of a module of ``shared`` in ``ORDER``, by the longest entry that it lies in."""
    name = name.removeprefix("tandem.shared.")
    lies_in = [
        (len(entry), at) for at, names in enumerate(ORDER) for entry in names if within(name, entry)
    ]
    assert lies_in, f"shared.{name} has no place in ORDER"
    return max(lies_in)[1]


def test_nothing_in_shared_imports_upwards() -> None:
    modules = [m for m in MODULES if m.parts[0] == "shared" and m.name != "__init__.py"]
    wrong = []
    for module in modules:
        own = ".".join(("tandem", *module.with_suffix("").parts))
        ours = [n for n in imports(module) if within(n, "tandem.shared")]
        wrong += [f"{module}: {n}" for n in ours if tier(n) > tier(own)]
    assert wrong == []


@pytest.mark.parametrize("folder", ROUTER)
def test_folders_of_the_router_import_only_what_they_may(folder: str) -> None:
    allowed = [f"tandem.router.{name}" for name in (folder, *ROUTER[folder])]
    wrong = []
    for module in (m for m in MODULES if m.parts[:2] == ("router", folder)):
        ours = [n for n in imports(module) if within(n, "tandem.router")]
        wrong += [f"{module}: {n}" for n in ours if not within(n, *allowed)]
    assert wrong == []


def test_the_router_has_no_other_folders() -> None:
    assert {m.parts[1] for m in MODULES if m.parts[0] == "router" and len(m.parts) > 2} == set(
        ROUTER
    )


def test_the_handoff_is_in_order() -> None:
    """Wire < carriers < plane < the rest; only `kinds.py` names the kinds of carriers."""
    floors = ("wire", "carriers", "plane")
    carriers = ROOT / "shared" / "handoff" / "carriers"
    kinds = {file.parent.name for file in carriers.glob("*/carrier.py")}
    assert kinds == {"cuda_ipc", "nixl", "shared_memory", "tcp"}
    wrong = []
    for module in MODULES:
        if module.parts[:2] != ("shared", "handoff") or module.name == "__init__.py":
            continue
        own, kind = module.parts[2], module.parts[3:4]
        for name in imports(module):
            inner = name.removeprefix("tandem.shared.handoff.").split(".")
            if not name.startswith("tandem.shared.handoff.") or inner[0] not in floors:
                continue
            upwards = own in floors and floors.index(inner[0]) > floors.index(own)
            names_a_kind = inner[0] == "carriers" and inner[1] in kinds and inner[1] not in kind
            if upwards or (names_a_kind and module.name != "kinds.py"):
                wrong.append(f"{module}: {name}")
    assert wrong == []


def test_imports_across_folders_are_relative() -> None:
    wrong = []
    for module in MODULES:
        for node in nodes(module):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            own = f"tandem.{module.parts[0]}"
            ours = [n for n in names if within(n, "tandem", *FOLDERS) and not within(n, own)]
            wrong += [f"{module}: {name}" for name in ours]
    assert wrong == []


def test_router_and_text_name_no_torch() -> None:
    parts = [m for m in MODULES if m.parts[0] == "router" or m.parts[:2] == ("shared", "text")]
    bad = [f"{m}: {n}" for m in parts for n in imports(m) if within(n, "torch", "transformers")]
    assert bad == []


def test_the_engine_names_no_web_framework() -> None:
    inner = ("engine", "models", "kv", "weights", "text")
    parts = [m for m in MODULES if m.parts[0] == "shared" and m.parts[1] in inner]
    assert [f"{m}: {n}" for m in parts for n in imports(m) if within(n, *WEB)] == []


def loaded_by(module: str) -> set[str]:
    code = f"import sys, {module}; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    return set(done.stdout.split())


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("tandem.router.server", {"torch", "transformers", "triton"}),
        ("tandem.shared.text.tokenizer", {"torch", "transformers", "triton"}),
        (
            "tandem.shared.engine.rank.loading",
            {*WEB, "transformers", "torch._dynamo", "numba", "triton"},
        ),
        ("tandem.shared.engine.rank.runner", {"msgpack", "msgspec", "zmq", "grpc", "pydantic"}),
        ("tandem.shared.engine.api.engine", {*WEB, "torch", "transformers"}),
        ("tandem", {"torch", "numpy", "grpc", "click", "asyncio", "tandem.shared"}),
        ("tandem.bench.serving, tandem.bench.interfering", {"torch", "numpy", "grpc", "rich"}),
        ("tandem.__main__", {"torch", "numpy", "grpc", "fastapi"}),
    ],
)
def test_a_process_does_not_load(module: str, absent: set[str]) -> None:
    assert loaded_by(module) & absent == set()


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
    for node in nodes(module):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        else:
            names = []
        yield from (n for n in names if within(n, "pickle", "cPickle", "dill", "shelve", "marshal"))
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in ("eval", "exec", "torch.load", "np.load", "numpy.load", "yaml.load"):
                yield called


def test_no_file_and_no_peer_can_run_code() -> None:
    modules = [*MODULES, Path("__init__.py"), Path("__main__.py")]
    found = {str(m): list(_unsafe(m)) for m in modules}
    # Compiled kernels are code in any form; only their user can change their folder.
    kept = {"kernels/cpu/kept_code.py": ["pickle"]}
    assert {name: calls for name, calls in found.items() if calls} == kept
