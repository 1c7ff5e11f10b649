"""Settings of all tests: the search of property tests, the cache of compiled kernels for started
processes, what tests must not see of this machine, and the order of tests.

By default the same few examples every time, so that a change fails for what it changed. A long
search draws new ones: ``make test ARGS="--hypothesis-profile=long tests/shared/handoff"``.

And how Triton's kernels run, which Triton wants to know before it is first imported, and on what.
"""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tandem.__main__ import cli
from tandem.commands.part_command import option_variables
from tandem.shared.handoff.carriers.cuda_ipc.cuda_driver import device_count
from tandem.shared.process.lifeline import LIFELINE_FD, READY_FD, ROUTER_NUMBER
from tandem.tests.support.forked import ForkServerProcess, end_session_forker, fork_rank
from tandem.tests.support.quick_interpreter import make_quick, run_in_any_order

if find_spec("hypothesis") is not None:  # it is not on every machine with a GPU
    from hypothesis import HealthCheck, settings

    settings.register_profile("short", derandomize=True, deadline=None, database=None)
    settings.register_profile(
        "long", max_examples=5_000, deadline=None, suppress_health_check=list(HealthCheck)
    )
    settings.load_profile("short")

# Servers that run here leave their addresses and tokens in some of these folders, and batches in
# another; the options of a user are in the environment. Tests, and what they start, see neither.
PRIVATE = tempfile.mkdtemp(prefix="tandem-tests-")
os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
for name in ("TMPDIR", "XDG_RUNTIME_DIR", "XDG_STATE_HOME"):
    os.environ[name] = PRIVATE
tempfile.tempdir = None  # so that TMPDIR is looked at again
for name in {*option_variables(cli), READY_FD, LIFELINE_FD, ROUTER_NUMBER}:
    os.environ.pop(name, None)

# Tests start some two hundred interpreters, and each would compile our modules for itself.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
if device_count() == 0:
    os.environ.setdefault("TRITON_INTERPRET", "1")
# As ranks have it: Triton 3.9 warns where it is missing, and warnings are errors here.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

# Several workers share the cores, and threads that wait for each other in loops take them from all.
# Ranks that are started set their own count.
for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(name, "1")

# A client of HTTP reads the certificates that it trusts: 20 ms of CPU for all public ones. No test
# calls a public server, so one is enough.
if find_spec("certifi") is not None:
    import certifi

    END = "-----END CERTIFICATE-----\n"
    os.environ["SSL_CERT_FILE"] = f"{PRIVATE}/trusted.pem"
    first, _, _ = Path(certifi.where()).read_text().partition(END)
    Path(os.environ["SSL_CERT_FILE"]).write_text(first + END)

# One for all workers, if they load this file after the process that starts them.
FORK_SERVER = None if ForkServerProcess.is_running() else ForkServerProcess(f"{PRIVATE}/forks")

# Files that take long with few tests, longest first.
LONG = (
    "test_compile_ahead.py",
    "test_other_generations.py",
    "test_oldest_triton.py",
    "test_soak.py",
    "test_on_gpu.py",
    "test_browser.py",
    "test_cpu_kernels.py",
    "test_layer_parts.py",
    "test_command_errors.py",
    "test_imports.py",
    "test_block_encoding.py",
    "test_graphs.py",
    "test_cluster_page.py",
    "test_tabs.py",
    "test_late_engine.py",
    "test_running.py",
    "test_server_processes.py",
    "test_unwritable_logs.py",
    "test_thread_cores.py",
    "test_container.py",
)
# Clusters of several files, which follow one another: a cluster that waits costs CPU.
FIRST_CLUSTER, LAST_CLUSTER = "campaign", "disaggregated"


@pytest.fixture(scope="module")
def forked_ranks() -> Iterator[None]:
    """Engines of this module have ranks that are forked, which costs a tenth of an interpreter's
    start. Ranks as they are otherwise started are in ``tests/shared/engine/test_executor.py``."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("tandem.shared.engine.executor.start_rank", fork_rank)
        yield


# What is imported, and the tests themselves, are millions of objects that live as long as the
# process; every full collection would look at all of them.
gc.disable()


def pytest_collection_finish() -> None:
    interpreter = sys.modules.get("triton.runtime.interpreter")
    if interpreter is not None:
        make_quick(interpreter)
        run_in_any_order(interpreter)
    if "torch" in sys.modules:
        from tandem.tests.support.poisoned import poison_allocations

        poison_allocations()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    end_session_forker()
    if FORK_SERVER is not None:
        FORK_SERVER.close()
    shutil.rmtree(PRIVATE, ignore_errors=True)
    if hasattr(config, "workerinput"):  # of xdist, whose results are sent
        atexit._run_exitfuncs()
        os._exit(0)  # without freeing what was imported, which takes seconds


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without those that are run only if a variable asks for them, and longest first, so that all
    workers of ``make test`` end together: those that are named above, tests that start processes,
    by the cluster that they share, then files with many tests."""
    unasked = [
        item
        for item in items
        if any(mark.args[0] not in os.environ for mark in item.iter_markers("asked_for"))
    ]
    config.hook.pytest_deselected(items=unasked)
    items[:] = [item for item in items if item not in unasked]
    sizes = Counter(item.path for item in items)
    fixtures: defaultdict[Path, set[str]] = defaultdict(set)
    for item in items:
        fixtures[item.path].update(getattr(item, "fixturenames", ()))

    def position(item: pytest.Item) -> tuple[int, bool, int, int, Path]:
        path = item.path
        starts_processes = "end_to_end" in path.parts
        cluster = (LAST_CLUSTER in fixtures[path]) - (FIRST_CLUSTER in fixtures[path])
        rank = LONG.index(path.name) if path.name in LONG else len(LONG)
        return rank, not starts_processes, cluster, -sizes[path], path

    items.sort(key=position)
