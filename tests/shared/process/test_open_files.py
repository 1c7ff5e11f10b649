"""A process may open as many files as its user may, whatever the shell's limit."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tandem.shared.process.open_files import (
    OTHER_FILES,
    RESERVED_PART,
    open_file_limit,
    open_files,
    room_for_connections,
    warn_of_few_connections,
)

PROGRAM = """
import resource, sys
from tandem.__main__ import main
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
sys.argv = ["tandem", "--version"]
try:
    main()
finally:
    print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(("soft", "hard"), [(256, 1000), (300, 300)])
def test_a_command_may_open_what_its_user_may(soft: int, hard: int) -> None:
    program = PROGRAM.format(soft=soft, hard=hard)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-2:] == [str(hard), str(hard)]


@pytest.mark.parametrize("max_files", [1 << 16, 8192, 4096, 1024, 160, 8])
def test_connections_leave_files_for_everything_else(max_files: int) -> None:
    room = room_for_connections(4096, max_files)
    assert 1 <= room <= 4096
    assert room == 1 or max_files - room >= open_files() + OTHER_FILES + max_files // RESERVED_PART
    assert (room == 4096) == (max_files >= 8192)
    assert room_for_connections(1, max_files) == 1


def test_few_connections_are_logged_with_a_remedy(caplog: pytest.LogCaptureFixture) -> None:
    warn_of_few_connections(100, 100)
    assert not caplog.messages
    warn_of_few_connections(4096, 700)
    (line,) = caplog.messages
    assert "at most 700 connections at a time, not its 4096 of --max-connections" in line
    assert f"may open {open_file_limit()} files" in line
    assert "ulimit" in line and "LimitNOFILE" in line
