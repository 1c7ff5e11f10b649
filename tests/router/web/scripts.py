"""Scripts of the fake node for tests of the page."""

from __future__ import annotations

import asyncio
from typing import Any

from tandem.tests.router.support import Cluster, admitted, finished, tokens_event, usage


def goes_on(c: Cluster, end: asyncio.Event) -> None:
    """Outputs begin at once, and end when ``end`` is set."""

    async def script(request: Any, context: Any) -> Any:
        yield admitted()
        yield usage(request)
        yield tokens_event(0, c.encode("it goes on"))
        await end.wait()
        yield tokens_event(0, c.encode(" to the end"))
        yield finished(0)

    c.node.script = script
