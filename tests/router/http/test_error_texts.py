"""Error messages contain no paths, addresses or tracebacks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import grpc
import pytest

from tandem.router import handler
from tandem.tests.router.node_scripts import refuse
from tandem.tests.router.support import cluster, events

SECRET = '/secret/path.py", line 5, 10.1.2.3:44: Traceback'
FAILURES = [
    code
    for code in grpc.StatusCode
    # The first is no failure, and the second is the node's message to the client.
    if code not in (grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT)
]


def tells_nothing(text: str) -> bool:
    return len(text) < 500 and not any(
        part in text for part in ("secret", ".py", "line 5", "10.1.2.3", "127.0.0.1", "Traceback")
    )


async def test_a_node_failure_has_a_message_of_the_router(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        for code in FAILURES:
            c.node.script = refuse(code, SECRET)
            for response in (await c.chat(), await c.complete(stream=True)):
                assert response.status_code in (500, 503, 504), code
                assert set(response.json()) == {"error"} and tells_nothing(response.text), code
        c.node.script = None
        assert (await c.chat()).status_code == 200
        assert c.node.server is not None
        await c.node.server.stop(None)
        response = await c.chat()
        assert response.status_code == 503 and tells_nothing(response.text)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_bug_is_an_error_without_its_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    def bug(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError(SECRET)

    async with cluster(tmp_path) as c:
        monkeypatch.setattr(handler, "collect_outputs", bug)
        monkeypatch.setattr(handler, "stream_outputs", bug)
        bodies: dict[str, dict[str, Any]] = {
            "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
            "/v1/completions": {"prompt": "hi"},
            "/v1/messages": {"model": "tiny", "max_tokens": 5}
            | {"messages": [{"role": "user", "content": "hi"}]},
            "/api/generate": {"model": "tiny", "prompt": "hi"},
        }
        for path, body in bodies.items():
            response = await c.client.post(path, json=body | {"stream": stream})
            assert tells_nothing(response.text), (path, response.text)
            parts = [response.text]
            if response.status_code == 200:
                parts = [json.dumps(one) for one in events(response.text)] or [response.text]
            assert "error" in parts[-1], path
        monkeypatch.undo()
        assert (await c.chat(stream=stream)).status_code == 200
