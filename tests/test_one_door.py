"""Nodes reach the engine through ``EngineCore`` alone."""

from __future__ import annotations

import ast
from pathlib import Path

from tandem.tests.test_imports import MODULES, ROOT, imports, within

ENGINE = Path("shared/engine")
# Modules whose state has one owner, inside the package.
PRIVATE = tuple(
    f"tandem.shared.engine.{name}" for name in ("scheduling", "channel", "executor", "rank")
)
API = "tandem.shared.engine.api"
OUTSIDE = [module for module in MODULES if not module.is_relative_to(ENGINE)]


def test_only_the_engine_names_its_scheduler() -> None:
    named = [
        f"{module}:{node.lineno}"
        for module in OUTSIDE
        for node in ast.walk(ast.parse((ROOT / module).read_text()))
        if isinstance(node, ast.Attribute) and node.attr.lstrip("_") == "scheduler"
    ]
    assert OUTSIDE and named == []


def test_only_the_engine_imports_its_private_modules() -> None:
    wrong = [f"{m}: {name}" for m in OUTSIDE for name in imports(m) if within(name, *PRIVATE)]
    assert wrong == []


def test_nodes_do_not_use_the_python_api() -> None:
    nodes = [m for m in OUTSIDE if m.parts[0] in ("decode_node", "prefill_node")]
    wrong = [f"{m}: {name}" for m in nodes for name in imports(m) if within(name, API)]
    assert nodes and wrong == []
