"""One engine start in its own process: reads the engine options, prints the startup seconds."""

from __future__ import annotations

import json
import sys
import time

from tandem.shared.config import EngineConfig
from tandem.shared.engine.api.engine import Engine
from tandem.shared.errors import TandemError


def main() -> None:
    """Start and end an engine."""
    engine = Engine(EngineConfig(**json.load(sys.stdin)))
    begin = time.perf_counter()
    try:
        engine.start()
    except TandemError as error:
        sys.exit(" ".join(str(error).split()))
    print(time.perf_counter() - begin, flush=True)
    engine.close()


if __name__ == "__main__":
    main()
