"""A process may open as many files as its user, whatever the shell began with."""

from __future__ import annotations

import subprocess
import sys

import pytest

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
