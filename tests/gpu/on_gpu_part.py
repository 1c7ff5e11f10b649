"""A part of a run on a GPU that follows its arguments; for the tests of ``on_gpu``."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path


def main() -> int:
    what = sys.argv[1]
    print(f"it {what}")
    if what == "hangs":
        sys.stdout.flush()
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        (Path(sys.argv[2]) / "child").write_text(str(child.pid))
        time.sleep(600)
    return 3 if what == "fails" else 0


if __name__ == "__main__":
    sys.exit(main())
