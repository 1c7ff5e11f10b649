"""Makes an interpreter whose PYTHONPATH has this folder find no package beyond ``packages.txt``, as
on a machine with a GPU; see ``test_on_gpu.py``."""

from __future__ import annotations

import importlib.metadata
import re
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


_every = importlib.metadata.distributions
_PACKAGES = Path(__file__).parents[4] / "tools" / "on_gpu" / "packages.txt"
_LINES = _PACKAGES.read_text().splitlines()
_LISTED = {name for line in _LINES if not line.startswith("#") for name in line.split()}
# This package is there too, without what it asks for.
THERE = _LISTED | {"tandem-llm"}
_HIDDEN = {
    module
    for module, owners in importlib.metadata.packages_distributions().items()
    if not any(_normal(owner) in THERE for owner in owners)
}


def _there(**options: Any) -> Iterator[importlib.metadata.Distribution]:
    return (each for each in _every(**options) if _normal(each.metadata["Name"]) in THERE)


class _Bare(PathFinder):
    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find nothing that is hidden."""
        if fullname.partition(".")[0] in _HIDDEN:
            return None
        return super().find_spec(fullname, path, target)


importlib.metadata.distributions = _there
sys.meta_path[sys.meta_path.index(PathFinder)] = _Bare
