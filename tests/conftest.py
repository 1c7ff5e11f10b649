"""Settings of all tests: the search of property tests, the cache of compiled kernels for started
processes, and the order of tests.

By default the same few examples every time, so that a change fails for what it changed. A long
search draws new ones: ``make test ARGS="--hypothesis-profile=long tests/shared/handoff"``.

And how Triton's kernels run, which Triton wants to know before it is first imported.
"""

from __future__ import annotations

import gc
import os
from collections import Counter, defaultdict
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tandem.shared.handoff.carriers.cuda_ipc.cuda_driver import device_count

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

SOAK = "test_soak.py"
# Clusters of several files, which follow one another: a cluster that waits costs CPU.
FIRST_CLUSTER, LAST_CLUSTER = "campaign", "disaggregated"


@pytest.fixture(scope="session", autouse=True)
def own_state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """State files of this user, such as batches, are left alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


# What is imported, and the tests themselves, are millions of objects that live as long as the
# process; every full collection would look at all of them.
gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Longest first, so that all workers of ``make test`` end together: the soak, tests that start
    processes, by the cluster that they share, then files with many tests."""
    sizes = Counter(item.path for item in items)
    fixtures: defaultdict[Path, set[str]] = defaultdict(set)
    for item in items:
        fixtures[item.path].update(getattr(item, "fixturenames", ()))

    def position(item: pytest.Item) -> tuple[bool, bool, int, int, Path]:
        path = item.path
        starts_processes = "end_to_end" in path.parts
        cluster = (LAST_CLUSTER in fixtures[path]) - (FIRST_CLUSTER in fixtures[path])
        return path.name != SOAK, not starts_processes, cluster, -sizes[path], path

    items.sort(key=position)
