"""Throughput of KV between two processes of one host in shared memory, against a memcpy.

python -m tandem.benchmarks.handoff_shared_memory
"""

from __future__ import annotations

from tandem.benchmarks.support.handoff_ring import compare
from tandem.shared.handoff.carriers.shared_memory import NAME as SHARED_MEMORY

if __name__ == "__main__":
    compare("handoff_shared_memory", SHARED_MEMORY, ">=0.6")
