"""The figures that CONTRIBUTING.md sets for the code: sizes, names, and how docstrings open."""

from __future__ import annotations

import ast
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = (
    "bench",
    "client",
    "commands",
    "router",
    "prefill_node",
    "decode_node",
    "shared",
    "kernels",
)
MAX_FILE_LINES = 450
MAX_FILES_IN_FOLDER = 17
MAX_LOOSE_IN_SHARED = 4
# A kernel is one loop nest, which helper functions would hide.
KERNELS = Path("kernels")
MAX_FUNCTION_LINES = 60
MAX_MEDIAN_LINES = 7
MAX_P90_LINES = 20
OPENINGS = {"What", "Whether", "Who", "Where", "Of"}
MAX_OPENINGS = 0.02
# Files of one name are counterparts of each other.
COUNTERPARTS = {
    "__init__.py",
    # Of both kinds of node, of a head and a rank, of the router and a node.
    "canary.py",
    "messages.py",
    "metrics.py",
    "process.py",
    "role.py",
    "service.py",
    # Of two APIs of the router.
    "answers.py",
    # Of a package's own boundary.
    "carrier.py",
    "errors.py",
    "operators.py",
    # A layer of the models, and the kernels that compute it.
    "attention.py",
    "cache.py",
    "linear.py",
    "norm.py",
    "quantized_linear.py",
    "rope.py",
}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def sources() -> Iterator[tuple[Path, str]]:
    tops = [ROOT / "__init__.py", ROOT / "__main__.py"]
    for path in chain(tops, *((ROOT / folder).rglob("*.py") for folder in FOLDERS)):
        yield path.relative_to(ROOT), path.read_text()


TREES = {path: ast.parse(text) for path, text in sources()}


def functions() -> Iterator[tuple[Path, Function, int]]:
    """Every function with the lines of its body, from its name to its end."""
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, Function):
                yield path, node, (node.end_lineno or node.lineno) - node.lineno + 1


def test_files_and_folders_are_small() -> None:
    long = {str(path): n for path, text in sources() if (n := text.count("\n")) > MAX_FILE_LINES}
    assert long == {}
    folders = Counter(path.parent for path in TREES if path.name != "__init__.py")
    full = {str(folder): n for folder, n in folders.items() if n > MAX_FILES_IN_FOLDER}
    assert full == {}
    assert folders[Path("shared")] <= MAX_LOOSE_IN_SHARED


def test_functions_are_small() -> None:
    lengths = sorted(lines for _, _, lines in functions())
    assert statistics.median(lengths) <= MAX_MEDIAN_LINES
    assert lengths[len(lengths) * 9 // 10] <= MAX_P90_LINES
    long = {
        f"{path}:{node.name}": lines
        for path, node, lines in functions()
        if lines > MAX_FUNCTION_LINES and path.parts[0] != KERNELS.name
    }
    assert long == {}


def test_a_name_means_one_thing() -> None:
    classes: dict[str, list[str]] = defaultdict(list)
    for path, tree in TREES.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                classes[node.name.lstrip("_")].append(str(path))
    assert {name: found for name, found in classes.items() if len(found) > 1} == {}
    files: dict[str, list[str]] = defaultdict(list)
    for path in TREES:
        files[path.name].append(str(path))
    twice = {name: found for name, found in files.items() if len(found) > 1}
    assert {name: found for name, found in twice.items() if name not in COUNTERPARTS} == {}


def test_docstrings_open_with_their_subject() -> None:
    openings = []
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, (Function, ast.ClassDef, ast.Module)):
                text = ast.get_docstring(node)
                if text:
                    openings.append((text.split()[0].strip(".,:"), str(path)))
    wrong = [place for word, place in openings if word in OPENINGS]
    assert len(wrong) < MAX_OPENINGS * len(openings), Counter(wrong).most_common(9)
