"""How long property tests search, what started processes need not compile again, and which tests
run first.

By default the same few examples every time, so that a change fails for what it changed. A long
search draws new ones: ``make test ARGS="--hypothesis-profile=long tests/shared/handoff"``.

And how Triton's kernels run, which Triton wants to know before it is first imported.
"""

from __future__ import annotations

import os
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest

from tandem.shared.handoff.cuda_driver import device_count

if find_spec("hypothesis") is not None:  # it is not on every machine with a GPU
    from hypothesis import HealthCheck, settings

    settings.register_profile("short", derandomize=True, deadline=None, database=None)
    settings.register_profile(
        "long", max_examples=5_000, deadline=None, suppress_health_check=list(HealthCheck)
    )
    settings.load_profile("short")

# Tests start some two hundred interpreters, and each would compile our modules for itself.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
if device_count() == 0:
    os.environ.setdefault("TRITON_INTERPRET", "1")
# As ranks have it: Triton 3.9 warns where it is missing, and warnings are errors here.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

# The soak takes longest of all, and the files of this folder share a cluster of four nodes.
SOAK, CAMPAIGN = Path("end_to_end", "test_soak.py"), Path("end_to_end", "handoff")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Longest first, so that no worker of ``make test`` is left alone at the end: the soak, what
    starts processes, then files with many tests. A group stays together on one worker."""
    groups = [_group(item.path.relative_to(Path(__file__).parent)) for item in items]
    sizes = Counter(groups)

    def position(numbered: tuple[int, pytest.Item]) -> tuple[bool, bool, int, str]:
        group = groups[numbered[0]]
        starts_processes = group.parts[0] == "end_to_end"
        return group != SOAK, not starts_processes, -sizes[group], str(group)

    ordered = sorted(enumerate(items), key=position)
    for number, item in ordered:
        item.add_marker(pytest.mark.xdist_group(str(groups[number])))
    items[:] = [item for _, item in ordered]


def _group(file: Path) -> Path:
    return CAMPAIGN if file.is_relative_to(CAMPAIGN) else file
