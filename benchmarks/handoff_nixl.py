"""Throughput of KV between two processes of one host by NIXL, against a memcpy.

    python -m tandem.benchmarks.handoff_nixl

On one host the library copies from one process into the other (CMA) where the system lets it;
``UCX_TLS=tcp`` makes it use TCP. It says nothing of RDMA, which has its own hardware.
"""

from __future__ import annotations

from tandem.benchmarks.support.handoff_ring import compare
from tandem.shared.handoff.carriers.nixl import NAME as NIXL

if __name__ == "__main__":
    compare("handoff_nixl", NIXL, "")
