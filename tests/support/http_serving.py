"""An HTTP server of a test, at a port of this machine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TypeVar

Hub = TypeVar("Hub")


@contextmanager
def serving_with(
    handler: type[BaseHTTPRequestHandler], make_hub: Callable[[str], Hub]
) -> Iterator[Hub]:
    """Serve with ``handler``, whose ``server.hub`` is made of the server's URL."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    hub = make_hub(f"http://127.0.0.1:{server.server_port}")
    server.hub = hub  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
