"""The stages that a token passes in the router, from a node's event to the socket."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from tandem import router
from tandem.router.node_call import NodeCall
from tandem.tests.router.support import cluster, events

ROUTER = str(Path(router.__file__).parent)


def frames() -> list[str]:
    """The router's functions on the stack, the innermost first."""
    names = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.startswith(ROUTER):
            names.append(frame.f_code.co_qualname)
        frame = frame.f_back
    return names


async def test_events_go_straight_to_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No middleware wraps the function that sends them."""
    send, callers = RequestResponseCycle.send, []

    async def recorded(cycle: RequestResponseCycle, message: Any) -> None:
        caller = sys._getframe(1)
        callers.append((message["type"], caller.f_code.co_qualname))
        await send(cycle, message)

    monkeypatch.setattr(RequestResponseCycle, "send", recorded)
    async with cluster(tmp_path) as c:
        await c.complete("hi", stream=True)
    assert set(callers) == {
        ("http.response.start", "HttpExchange._start"),
        ("http.response.body", "HttpExchange._write"),
    }


@pytest.mark.parametrize("stream", [True, False])
async def test_a_token_passes_four_stages_between_the_node_and_the_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    read, seen = NodeCall.read, []

    async def recorded(call: NodeCall) -> object:
        event = await read(call)
        # This frame stands for ``read``; those below it are resumed with what it returns.
        seen.append(["NodeCall.read", *frames()])
        return event

    monkeypatch.setattr(NodeCall, "read", recorded)
    async with cluster(tmp_path) as c:
        answer = await c.complete("hi", stream=stream)
        assert not stream or events(answer.text)[-1] == "[DONE]"
    paths = {tuple(path) for path in seen}
    writer = "stream_outputs" if stream else "collect_outputs"
    (path,) = paths
    assert path[: path.index(writer) + 1] == (
        "NodeCall.read",
        "Dispatcher.events",
        "_serve_prompt",
        writer,
    )
