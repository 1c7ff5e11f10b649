"""A prefill rank in a process of its own, for a test that kills it in the middle of a transfer.

    python -m tandem.tests.shared.handoff.nixl_sender EPOCH PEER_EPOCH

It writes its endpoints as a line of JSON, and begins to send slowly when it reads a line.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from types import SimpleNamespace

from .plane_pair import BLOCK, Rank

END = 400


def main() -> None:
    epoch, peer_epoch = map(int, sys.argv[1:])
    with Rank("p", seed=1, epoch=epoch, carrier="nixl") as prefill:
        print(json.dumps(asdict(prefill.plane.endpoints)), flush=True)
        sys.stdin.readline()
        peer = SimpleNamespace(config=SimpleNamespace(node_id="d", epoch=peer_epoch, rank=0))
        blocks = range(END // BLOCK)
        prefill.open(peer, 1, blocks, first_token=0, end_token=END, progress_seconds=60.0)
        for token in range(END - 1):
            prefill.compute(1, token, token + 1, chunk=1)
            time.sleep(0.01)
        sys.stdin.readline()


if __name__ == "__main__":
    main()
