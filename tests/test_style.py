"""The figures that CONTRIBUTING.md sets: sizes and names of the code and its tests, and how the
code's docstrings open."""

from __future__ import annotations

import ast
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
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
TESTS = Path("tests")
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


def sources_of_tests() -> Iterator[tuple[Path, str]]:
    for path in (ROOT / TESTS).rglob("*.py"):
        yield path.relative_to(ROOT), path.read_text()


TREES = {path: ast.parse(text) for path, text in sources()}
TEST_TREES = {path: ast.parse(text) for path, text in sources_of_tests()}
ALL_TREES = TREES | TEST_TREES
PRODUCT_NAMES = {path.name for path in TREES}


def functions(trees: Mapping[Path, ast.Module]) -> Iterator[tuple[Path, Function, int]]:
    """Every function with the lines of its body, from its name to its end."""
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, Function):
                yield path, node, (node.end_lineno or node.lineno) - node.lineno + 1


def test_files_and_folders_are_small() -> None:
    texts = chain(sources(), sources_of_tests())
    long = {str(path): n for path, text in texts if (n := text.count("\n")) > MAX_FILE_LINES}
    assert long == {}
    folders = Counter(path.parent for path in ALL_TREES if path.name != "__init__.py")
    results = (ROOT / TESTS).glob("benchmarks/results/**/*.*")
    folders.update(path.relative_to(ROOT).parent for path in results)
    full = {str(folder): n for folder, n in folders.items() if n > MAX_FILES_IN_FOLDER}
    assert full == {}
    assert folders[Path("shared")] <= MAX_LOOSE_IN_SHARED


def test_functions_are_small() -> None:
    lengths = sorted(lines for _, _, lines in functions(TREES))
    assert statistics.median(lengths) <= MAX_MEDIAN_LINES
    assert lengths[len(lengths) * 9 // 10] <= MAX_P90_LINES
    long = {
        f"{path}:{node.name}": lines
        for path, node, lines in functions(ALL_TREES)
        if lines > MAX_FUNCTION_LINES and path.parts[0] != KERNELS.name
    }
    assert long == {}


def test_a_name_means_one_thing() -> None:
    classes: dict[str, list[str]] = defaultdict(list)
    for path, tree in ALL_TREES.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                classes[node.name.lstrip("_")].append(str(path))
    assert {name: found for name, found in classes.items() if len(found) > 1} == {}
    files: dict[str, list[str]] = defaultdict(list)
    for path in ALL_TREES:
        if not _mirrors(path):
            files[path.name].append(str(path))
    twice = {name: found for name, found in files.items() if len(found) > 1}
    assert {name: found for name, found in twice.items() if name not in COUNTERPARTS} == {}


def _mirrors(path: Path) -> bool:
    """True for files that are named after what they test, measure or prepare: tests of one thing
    stand in several folders, as the thing does, and so do pytest's ``conftest.py``; a benchmark, or
    a test's helper, may have the name of the module of the product that it is about."""
    return path.parts[0] == TESTS.name and (
        path.name.startswith("test_")
        or path.name in {"conftest.py", "__main__.py"}
        or path.name in PRODUCT_NAMES
    )


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
