"""The access log: one line per request, without its text."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

from tandem.proto import tandem_pb2 as pb
from tandem.router.cluster.node import Node
from tandem.router.prompt_outputs import PromptOutputs
from tandem.shared.telemetry.logs import LogSettings, _TextLines
from tandem.tests.router.support import (
    Cluster,
    admitted,
    cluster,
    finished,
    tokens_event,
    until,
    usage,
)

SECRET = "Rumpelstiltskin"
FIRST_TOKEN = pb.FirstToken(queue_seconds=0.25, prefill_seconds=0.5)


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """The fields of all lines so far, as in --log-format=json."""
    return [vars(record)["fields"] for record in caplog.records if record.name == "tandem.access"]


async def next_line(caplog: pytest.LogCaptureFixture, count: int = 1) -> dict[str, Any]:
    """The newest line, which is written after the response."""
    await until(lambda: len(lines(caplog)) >= count)
    return lines(caplog)[-1]


def tell_where(c: Cluster, **fields: Any) -> None:
    """Make the node report where its prompts were prefilled."""

    async def script(request: Any, context: Any) -> Any:
        yield admitted()
        usage: dict[str, Any] = {"prompt_tokens": len(request.prompt), "cached_tokens": 1}
        usage |= {"first_token": FIRST_TOKEN} | fields
        yield pb.GenerateEvent(usage=pb.Usage(**usage))
        for index in range(request.sampling.n):
            yield tokens_event(index, [1, 2, 3])
            yield finished(index)

    c.node.script = script


@pytest.fixture(autouse=True)
def at_info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tandem")


async def test_a_request_is_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with cluster(tmp_path) as c:
        tell_where(c, prefill_node="prefill-7", remote_tokens=5)
        response = await c.complete(SECRET)
        line = await next_line(caplog)
        assert line.pop("ttft_seconds") <= line.pop("total_seconds")
        assert line == {
            "method": "POST",
            "path": "/v1/completions",
            "status": 200,
            "model": "tiny",
            "prompt_tokens": response.json()["usage"]["prompt_tokens"],
            "cached_tokens": 1,
            "output_tokens": 3,
            "finish_reason": "stop",
            "decode_nodes": ["decode-0"],
            "prefill_nodes": ["prefill-7"],
            "prefilled": "remote",
            "first_token": {"router": 0.0, "queue": 0.25, "prefill": 0.5},
        }
        assert SECRET not in caplog.text
        page = c.router.metrics.render().decode()
        for phase, seconds in line["first_token"].items():
            assert f'tandem_first_token_phase_seconds_sum{{phase="{phase}"}} {seconds}\n' in page


@pytest.mark.parametrize(
    ("reason", "label"),
    [
        ("below threshold", "local (below threshold)"),
        ("failed: peer_lost", "local (failed: peer_lost)"),
        ("words of a newer version", "local (other)"),
    ],
)
async def test_local_prefill_is_counted_with_its_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, reason: str, label: str
) -> None:
    async with cluster(tmp_path) as c:
        tell_where(c, local_reason=reason)
        await c.complete(["one", "two"], n=2)
        line = await next_line(caplog)
        assert line["prefilled"] == f"{label} x2"
        assert line["finish_reason"] == "stop x4" and line["output_tokens"] == 12
        page = c.router.metrics.render().decode()
        reason = label[7:-1]
        assert f'tandem_router_prompts_total{{reason="{reason}",where="local"}} 2.0' in page


@pytest.mark.parametrize("header", ["authorization", "x-api-key"])
async def test_a_line_names_the_owner_of_the_key(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, header: str
) -> None:
    file = tmp_path / "keys"
    lines_of_file = ["alice: {}-1", "bob.smith@x-y:\t{}-2", "alice: {}-3", "{}-4"]
    file.write_text("\n".join(lines_of_file).replace("{}", SECRET))
    owners = ["alice", "bob.smith@x-y", "alice", "key-1"]
    async with cluster(tmp_path, api_key_file=str(file)) as c:
        for number, owner in enumerate(owners, 1):
            key = f"{SECRET}-{number}"
            headers = {header: f"Bearer {key}" if header == "authorization" else key}
            response = await c.client.post("/v1/completions", json={"prompt": "x"}, headers=headers)
            line = await next_line(caplog, number)
            assert (response.status_code, line.get("key")) == (200, owner)
        await c.client.get("/v1/models", headers={header: f"Bearer alice: {SECRET}-1"})
        line = await next_line(caplog, len(owners) + 1)
        assert (line["status"], line.get("key")) == (401, None)
    assert SECRET not in caplog.text and SECRET not in repr(lines(caplog))


@pytest.mark.parametrize("stream", [False, True])
async def test_a_rejected_request_is_a_line_without_its_words(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    async with cluster(tmp_path, api_key=SECRET) as c:
        headers = {"authorization": f"Bearer {SECRET}"}
        await c.complete(SECRET)
        line = await next_line(caplog)
        assert (line["status"], line["error"]) == (401, "invalid_api_key")
        body = {"prompt": SECRET, "stream": stream, "model": SECRET}
        await c.client.post("/v1/completions", json=body, headers=headers)
        line = await next_line(caplog, 2)
        assert (line["status"], line["error"]) == (404, "model_not_found")
        await c.client.get("/v1/nothing", headers=headers)
        line = await next_line(caplog, 3)
        assert (line["method"], line["status"], line["error"]) == ("GET", 404, "unknown_url")
        assert SECRET not in caplog.text and SECRET not in repr(lines(caplog))


async def test_a_stream_that_fails_has_its_error_and_what_was_sent(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(request: Any, context: Any) -> Any:
        yield admitted()
        yield tokens_event(0, [1])
        yield finished(0, pb.FINISH_REASON_ERROR, error="broken")

    async with cluster(tmp_path) as c:
        c.node.script = fail
        await c.complete("x", stream=True)
        line = await next_line(caplog)
        assert (line["status"], line["output_tokens"]) == (200, 1)
        assert line["error"] and "finish_reason" not in line and line["cached_tokens"] == 0


async def test_what_each_of_several_nodes_generated_counts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first node dies when two of three choices have finished, and the client disconnects
    before the second one sends a token."""
    requests: list[pb.GenerateRequest] = []
    moves: list[str] = []
    move_to = PromptOutputs.move_to

    def noted(outputs: PromptOutputs, node: Node) -> None:
        move_to(outputs, node)
        moves.append(node.node_id)

    monkeypatch.setattr(PromptOutputs, "move_to", noted)

    async def script(request: pb.GenerateRequest, context: Any) -> Any:
        requests.append(request)
        yield admitted()
        yield usage(request)
        if len(requests) > 1:
            await asyncio.Event().wait()
        for index in range(2):
            yield tokens_event(index, [70, 71])
            yield finished(index)
        yield finished(2, pb.FINISH_REASON_ERROR, error="broken")

    async with cluster(tmp_path, nodes=2) as c:
        for node in c.nodes:
            node.script = script
        body = {"prompt": "hi", "n": 3}
        leaving = asyncio.create_task(c.client.post("/v1/completions", json=body))
        await until(lambda: len(moves) == 2)
        leaving.cancel()
        line = await next_line(caplog)
        assert line["client_gone"] and line["output_tokens"] == 4
        assert line["finish_reason"] == "stop x2" and "ttft_seconds" in line
        assert line["decode_nodes"] == ["decode-0", "decode-1"]
        page = c.router.metrics.render().decode()
        for gauge in ("vllm:num_requests_running", "vllm:num_requests_waiting"):
            [value] = [row for row in page.splitlines() if row.startswith(gauge + "{")]
            assert value.endswith(" 0.0")


async def test_a_stream_of_messages_that_ends_is_no_disconnect(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Pings end with it, which takes longer than the server needs to report its end."""
    async with cluster(tmp_path) as c:
        body = {"model": "tiny", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
        for number in range(1, 6):
            response = await c.client.post("/v1/messages", json=body | {"stream": True})
            assert "message_stop" in response.text
            line = await next_line(caplog, number)
            assert line["status"] == 200 and "client_gone" not in line


async def test_a_disconnect_of_the_client_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def stall(request: Any, context: Any) -> Any:
        yield admitted()
        yield tokens_event(0, [1])
        await asyncio.Event().wait()

    async with cluster(tmp_path) as c:
        c.node.script = stall
        task = asyncio.create_task(c.complete("x"))
        await c.first_tokens()
        task.cancel()
        line = await next_line(caplog)
        assert (line["status"], line["client_gone"]) == (499, True)
        assert line["decode_nodes"] == ["decode-0"] and "prefilled" not in line


async def test_polls_are_for_debugging_and_all_of_it_can_be_turned_off(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with cluster(tmp_path) as c:
        await c.client.get("/health")
        await c.client.get("/metrics")
        await c.client.get("/version")
        assert (await next_line(caplog))["path"] == "/version"
        assert len(lines(caplog)) == 1
    async with cluster(tmp_path, access_log=False) as c:
        await c.client.get("/version")
    assert len(lines(caplog)) == 1


async def test_the_line_for_people(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with cluster(tmp_path) as c:
        tell_where(c, local_reason="no prefill node")
        await c.client.post("/v1/completions", json={"prompt": "x"}, headers={"x-request-id": "r"})
        await next_line(caplog)
    [record] = [record for record in caplog.records if record.name == "tandem.access"]
    line = _TextLines(LogSettings()).format(record)
    assert "INFO tandem.access POST /v1/completions 200 model=tiny prompt_tokens=1 " in line
    assert 'prefilled="local (no prefill node)" first_token="router 0.000 queue 0.250' in line


async def test_requests_that_fail_to_parse_are_logged_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with cluster(tmp_path) as c:
        reader, writer = await asyncio.open_connection("127.0.0.1", c.router.http_port)
        writer.write(f"{SECRET}\r\n\r\n".encode())
        assert b" 400 " in await asyncio.wait_for(reader.readline(), 10)
        writer.close()
        line = await next_line(caplog)
        assert (line["method"], line["status"]) == ("-", 400) and SECRET not in repr(line)
