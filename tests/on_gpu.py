"""All that only a CUDA device can show, in one go and with the interpreter that runs it:

    python -m tandem.tests.on_gpu

Tests first, then the benchmark, whose result it writes. Elsewhere these tests skip or run over
stand-ins.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent
TESTS = (
    "tests/kernels/test_row_sums.py",
    "tests/kernels/test_paged_decode.py",
    "tests/shared/models/test_on_device.py",
    "tests/shared/handoff/test_cuda_driver.py",
    "tests/shared/handoff/test_gpu.py",
    "tests/shared/handoff/test_cuda_ipc.py",
    "tests/shared/handoff/test_cuda_ipc_caches.py",
    "tests/end_to_end/test_cuda_ipc.py",
)
BENCHMARK = "tandem.tests.benchmarks.handoff_cuda_ipc"


def main() -> int:
    if not torch.cuda.is_available():
        print("there is no CUDA device here; these tests run over stand-ins in `make test`")
        return 0
    tests = [str(ROOT / each) for each in TESTS]
    for command in (["pytest", "-q", "-c", str(ROOT / "pyproject.toml"), *tests], [BENCHMARK]):
        status = subprocess.run([sys.executable, "-m", *command]).returncode
        if status:
            return status
    return 0


if __name__ == "__main__":
    sys.exit(main())
