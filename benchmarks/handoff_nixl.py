"""Throughput of KV between two processes of one host by NIXL, against a memcpy.

    python -m tandem.benchmarks.handoff_nixl

On one host the library copies between processes with CMA where the system permits it;
``UCX_TLS=tcp`` selects TCP. The results do not apply to RDMA hardware.
"""

from __future__ import annotations

from tandem.benchmarks.support.handoff_ring import compare
from tandem.shared.handoff.carriers.nixl import NAME as NIXL

if __name__ == "__main__":
    compare("handoff_nixl", NIXL, "")
