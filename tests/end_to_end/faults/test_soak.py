"""Twenty seconds of the soak; `python -m tandem.tests.soak` goes on for longer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.tests.end_to_end.support.cluster import running
from tandem.tests.soak import Soak

# Other tests run beside it.
PAUSE_SECONDS = 1.0
# Five faults or more.
SECONDS, INTERVAL_SECONDS = 20.0, 1.5


@pytest.mark.timeout(600)
def test_load_and_faults_leave_nothing_behind(tmp_path: Path, tiny_model: str) -> None:
    with running(tmp_path, tiny_model) as cluster:
        figures = Soak(cluster, pause=PAUSE_SECONDS, interval=INTERVAL_SECONDS).run(SECONDS)
    assert figures["wrong answers"] == 0 and figures["faults"] > 0
