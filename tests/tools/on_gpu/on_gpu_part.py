"""A part of a run on a GPU that follows its arguments; for the tests of ``on_gpu``."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path


def main() -> int:
    what = sys.argv[1]
    print(f"it {what}", flush=True)
    if what == "answers":
        (Path(sys.argv[2]) / "machine.json").write_text(json.dumps({"good": True, "bad": False}))
    if what == "hangs":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        print(f"child {child.pid}", flush=True)
        time.sleep(600)
    return 3 if what == "fails" else 0


if __name__ == "__main__":
    sys.exit(main())
