"""Calls that wait for the client's approval, on responses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tandem.router.database import Database
from tandem.router.errors import ApiError
from tandem.router.mcp import approvals as approvals_module
from tandem.router.mcp.approvals import ApprovalResponse, Approvals
from tandem.router.mcp.request_approvals import RequestApprovals
from tandem.router.mcp.server_tools import CallOutcome, ServerTool
from tandem.router.state import SCHEMA
from tandem.shared.errors import RequestError
from tandem.tests.router.mcp.test_rounds import CLIENTS, SERVER, FakeServers, call, rounds, served
from tandem.tests.router.support import Cluster, until

GUARDED = SERVER | {"require_approval": "always"}
SOME = SERVER | {"require_approval": {"never": {"tool_names": ["add"]}}}
TWO_CALLS = "I try." + call("s__drop", a=1) + call("s__drop", a=2)


def yes(item: Any, **fields: Any) -> dict[str, Any]:
    """The approval of a call, or its denial."""
    request_id = item["id"] if isinstance(item, dict) else item.id
    return {
        "type": "mcp_approval_response",
        "approval_request_id": request_id,
        "approve": True,
    } | fields


def approval_requests(response: Any) -> list[Any]:
    return [item for item in response["output"] if item["type"] == "mcp_approval_request"]


async def post(c: Cluster, value: Any, **fields: Any) -> httpx.Response:
    return await c.client.post("/v1/responses", json={"input": value, "tools": [GUARDED], **fields})


async def request_approvals(c: Cluster, **fields: Any) -> dict[str, Any]:
    """A response that asks for approvals."""
    response = await post(c, "hi", **fields)
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


def error_of(response: httpx.Response) -> tuple[int, str, str]:
    error = response.json()["error"]
    return response.status_code, error["param"], error["code"]


@pytest.mark.parametrize("stored", [True, False])
def test_approved_calls_run_and_denied_ones_fail(stored: bool) -> None:
    with rounds(TWO_CALLS, "Done.") as (c, servers):
        client = c.openai()
        common: dict[str, Any] = {"tools": [GUARDED], "stream": True, "store": stored}
        events = list(client.responses.create(input="hi", **common))
        first = events[-1].response
        assert first.status == "completed" and servers.called == []
        kinds = ["mcp_list_tools", "message", "mcp_approval_request", "mcp_approval_request"]
        assert [item.type for item in first.output] == kinds
        event_types = [event.type for event in events if getattr(event, "output_index", 0) == 3]
        assert event_types == ["response.output_item.added", "response.output_item.done"]
        one, two = first.output[2:]
        assert (one.server_label, one.name, one.arguments) == ("s", "drop", '{"a": 1}')
        approvals = [yes(one), yes(two, approve=False, reason="too dear")]
        history: dict[str, Any] = {"input": approvals, "previous_response_id": first.id}
        if not stored:
            items = [item.model_dump(exclude_unset=True) for item in first.output]
            history = {"input": [{"role": "user", "content": "hi"}, *items, *approvals]}
        events = list(client.responses.create(**history, **common))
        second = events[-1].response
        assert [item.type for item in second.output] == ["mcp_list_tools", "mcp_call", "message"]
        result = second.output[1]
        assert (result.approval_request_id, result.status) == (one.id, "failed")
        assert result.error.content[0]["text"] == "not allowed" and second.output_text == "Done."
        event_types = [event.type for event in events if getattr(event, "output_index", 0) == 1]
        assert event_types == [
            "response.output_item.added", "response.mcp_call.in_progress",
            "response.mcp_call_arguments.delta", "response.mcp_call_arguments.done",
            "response.mcp_call.failed", "response.output_item.done",
        ]  # fmt: skip
        assert servers.called == [("s", "drop", '{"a": 1}')]
        text = c.prompt()
        assert text.index("I try.[s__drop][s__drop]") < text.index("Error: not allowed")
        assert (
            text.index("Error: not allowed") < text.index("denied this call") < text.index("dear")
        )
        # Both are a part of the conversation from now on, once.
        following: dict[str, Any] = {"input": "x", "previous_response_id": second.id}
        if not stored:
            items = [item.model_dump(exclude_unset=True) for item in second.output]
            following = {"input": [*history["input"], *items, {"role": "user", "content": "x"}]}
        last = client.responses.create(**following, tools=[GUARDED], store=stored)
        assert last.output_text == "Done." and len(servers.called) == 1
        assert c.prompt().count("[s__drop]") == 2 and c.prompt().count("not allowed") == 1


def test_only_tools_that_need_it_wait_for_an_approval() -> None:
    both = call("s__add", a=1) + call("s__drop") + call("now")
    with rounds(both) as (c, servers):
        response = c.create(input="hi", tools=[SOME, CLIENTS])
        kinds = [item["type"] for item in response["output"]]
        assert kinds == ["mcp_list_tools", "mcp_call", "function_call", "mcp_approval_request"]
        assert [name for _, name, _ in servers.called] == ["add"]
        for mode, waiting in (
            ({"always": {"tool_names": ["drop"]}, "never": {"read_only": True}}, ["drop"]),
            ({"always": {"tool_names": ["add"]}, "never": {}}, ["add"]),
            ({"always": {"tool_names": []}}, ["add", "drop"]),
            ("never", []),
        ):
            response = c.create(input="hi", tools=[SERVER | {"require_approval": mode}, CLIENTS])
            assert [item["name"] for item in approval_requests(response)] == waiting
            assert response["tools"][0]["require_approval"] == mode


async def test_a_call_runs_once_however_often_it_is_approved(tmp_path: Path) -> None:
    async with served(tmp_path, call("s__add", a=1), "Done.") as (c, servers):
        first = await request_approvals(c)
        [approval] = approval_requests(first)
        c.node.delay = 0.01
        again: dict[str, Any] = {"previous_response_id": first["id"]}
        responses = await asyncio.gather(*(post(c, [yes(approval)], **again) for _ in range(3)))
        assert sorted(response.status_code for response in responses) == [200, 400, 400]
        repeated = await post(c, [yes(approval)], **again)
        assert error_of(repeated)[2] == "approval_request_answered"
        denied = await post(c, [yes(approval, approve=False)], **again)
        assert error_of(denied)[2] == "approval_request_answered"
        assert servers.called == [("s", "add", '{"a": 1}')]


async def test_a_request_that_fails_can_be_sent_again_and_the_call_runs_once(
    tmp_path: Path,
) -> None:
    async with served(tmp_path, call("s__add", a=1), "Done.") as (c, servers):
        first = await request_approvals(c)
        [approval] = approval_requests(first)
        again: dict[str, Any] = {"previous_response_id": first["id"]}
        await c.node.stop()
        assert (await post(c, [yes(approval)], **again)).status_code in (500, 503)
        script = c.node.script
        (await c.replace(c.node)).script = script
        await until(lambda: c.router.app.handler.active == 0)
        denied = await post(c, [yes(approval, approve=False)], **again)
        assert error_of(denied)[2] == "approval_request_answered"
        body = (await post(c, [yes(approval)], **again)).json()
        assert body["output"][1]["output"] == "result 1" and len(servers.called) == 1
        usage = body["usage"]
        assert usage["input_tokens"] == len(c.nodes[-1].requests[-1].prompt)


def slow_calls(servers: FakeServers) -> tuple[asyncio.Event, asyncio.Event]:
    """Make calls wait: an event that one has begun, and one to let it go on."""
    started, finish = asyncio.Event(), asyncio.Event()

    async def slow(label: str, tool: str, arguments: str) -> CallOutcome:
        started.set()
        await finish.wait()
        servers.called.append((label, tool, arguments))
        return CallOutcome(text="late")

    servers.call = slow  # type: ignore[method-assign]
    return started, finish


async def test_a_call_goes_on_when_its_client_leaves(tmp_path: Path) -> None:
    async with served(tmp_path, call("s__add", a=1), "Done.") as (c, servers):
        first = await request_approvals(c)
        [approval] = approval_requests(first)
        started, finish = slow_calls(servers)
        again: dict[str, Any] = {"previous_response_id": first["id"]}
        leaving = asyncio.create_task(post(c, [yes(approval)], **again))
        await started.wait()
        leaving.cancel()
        await until(lambda: c.router.app.handler.active == 0)
        busy = await post(c, [yes(approval)], **again)
        assert error_of(busy)[2] == "approval_request_in_progress"
        finish.set()
        await until(lambda: servers.called != [])
        body = (await post(c, [yes(approval)], **again)).json()
        assert body["output"][1]["output"] == "late" and len(servers.called) == 1


async def ended(c: Cluster, response: dict[str, Any]) -> dict[str, Any]:
    """A response in the background, when it has ended."""
    await until(lambda: c.router.app.services.runs.find(response["id"], "") is None)
    body: dict[str, Any] = (await c.client.get(f"/v1/responses/{response['id']}")).json()
    return body


async def test_background_responses_request_approvals(tmp_path: Path) -> None:
    async with served(tmp_path, call("s__add", a=1), "Done.") as (c, servers):
        first = await request_approvals(c, background=True)
        assert first["status"] == "queued" and approval_requests(first) == []
        first = await ended(c, first)
        [approval] = approval_requests(first)
        assert first["status"] == "completed" and servers.called == []
        again: dict[str, Any] = {"previous_response_id": first["id"], "background": True}
        second = await ended(c, (await post(c, [yes(approval)], **again)).json())
        assert [item["type"] for item in second["output"]] == [
            "mcp_list_tools", "mcp_call", "message",
        ]  # fmt: skip
        assert second["output"][1]["output"] == "result 1"
        repeated = await ended(c, (await post(c, [yes(approval)], **again)).json())
        assert repeated["status"] == "failed" and len(servers.called) == 1


async def test_a_call_goes_on_when_its_response_in_the_background_is_cancelled(
    tmp_path: Path,
) -> None:
    async with served(tmp_path, call("s__add", a=1), "Done.") as (c, servers):
        first = await request_approvals(c)
        [approval] = approval_requests(first)
        started, finish = slow_calls(servers)
        again: dict[str, Any] = {"previous_response_id": first["id"]}
        body = (await post(c, [yes(approval)], **again, background=True)).json()
        await started.wait()
        cancelled = await c.client.post(f"/v1/responses/{body['id']}/cancel")
        assert cancelled.json()["status"] == "cancelled"
        finish.set()
        await until(lambda: servers.called != [])
        last = (await post(c, [yes(approval)], **again)).json()
        assert last["output"][1]["output"] == "late" and len(servers.called) == 1


UNKNOWN = "approval_request_not_found"


def place(index: int) -> str:
    return f"input[{index}].approval_request_id"


async def test_approvals_must_match_the_conversation(tmp_path: Path) -> None:
    async with served(tmp_path, TWO_CALLS, "Done.", api_key="one,two") as (c, servers):
        c.client.headers["authorization"] = "Bearer one"
        first = await request_approvals(c)
        one, two = approval_requests(first)
        again: dict[str, Any] = {"previous_response_id": first["id"]}
        forged = one | {"id": "mcpr_0"}
        changed = one | {"arguments": '{"a": 9}'}
        both, long = [yes(one), yes(two)], "x" * 4097
        narrow = GUARDED | {"allowed_tools": ["add"]}
        cases: tuple[tuple[Any, dict[str, Any], tuple[int, str, str]], ...] = (
            ("x", again, (400, "input", "missing_approval")),
            ([yes(one)], again, (400, "input", "missing_approval")),
            ([yes(one)], {}, (400, place(0), UNKNOWN)),
            ([yes(one), yes(one)], again, (400, place(1), "duplicate_approval")),
            ([yes(one, approve="yes")], again, (400, "input[0].approve", "invalid_type")),
            ([yes(one, reason=long)], again, (400, "input[0].reason", "string_above_max_length")),
            ([forged, yes(forged)], {}, (404, place(1), UNKNOWN)),
            ([changed, yes(changed)], {}, (400, place(1), "approval_request_changed")),
            (both, again | {"tools": []}, (400, "tools", "missing_required_parameter")),
            (both, again | {"tools": [narrow]}, (400, "tools", "invalid_value")),
        )
        for items, fields, expected in cases:
            response = await post(c, items, **fields)
            assert error_of(response) == expected, response.text
        # Another key has no part in it, even with the items.
        c.client.headers["authorization"] = "Bearer two"
        response = await post(c, [one, yes(one)])
        assert error_of(response) == (
            404,
            "input[1].approval_request_id",
            "approval_request_not_found",
        )
        assert servers.called == []
        c.client.headers["authorization"] = "Bearer one"
        open_ids = (await post(c, "x", **again)).json()["error"]["message"]
        assert open_ids.endswith(f"do not have an approval: {one['id']}, {two['id']}")
        listing = servers.listings.pop("s")
        servers.listings["s"] = type(listing)(label="s", error="gone")
        assert (await post(c, both, **again)).status_code == 503
        servers.listings["s"] = listing
        body = (await post(c, both, **again, max_tool_calls=1)).json()
        assert len(servers.called) == 1
        assert "limit of calls" in body["output"][2]["error"]["message"]


WRONG: tuple[tuple[Any, str], ...] = (
    ("sometimes", "tools[0].require_approval"),
    (["always"], "tools[0].require_approval"),
    ({"always": 5}, "tools[0].require_approval.always"),
    ({"never": {"tool_names": "x"}}, "tools[0].require_approval.never.tool_names"),
    ({"never": {"tool_names": ["x"] * 1025}}, "tools[0].require_approval.never.tool_names"),
)


def test_modes_are_checked_and_chats_have_none() -> None:
    with rounds("x") as (c, _):
        for mode, param in WRONG:
            tools = [SERVER | {"require_approval": mode}]
            response = c.post("/v1/responses", input="hi", tools=tools)
            assert response.status_code == 400, response.text
            assert response.json()["error"]["param"] == param, response.text
        response = c.chat(tools=[GUARDED])
        assert "only /v1/responses" in response.json()["error"]["message"]


# ---- the calls that wait -------------------------------------------------------------------------

TOOL = ServerTool("s", "t")


def approval_response(approval_id: str, **fields: Any) -> ApprovalResponse:
    defaults: dict[str, Any] = {"tool": TOOL, "arguments": "{}", "approve": True, "param": "p"}
    return ApprovalResponse(id=approval_id, **(defaults | fields))


@asynccontextmanager
async def waiting(now: list[float], path: Path | None = None) -> AsyncIterator[Approvals]:
    """Calls that wait for ten seconds, in memory or in a file."""
    database = Database(SCHEMA)
    await (database.open_in_memory() if path is None else database.open(path))
    try:
        yield Approvals(database, 10.0, lambda: now[0])
    finally:
        await database.close()


async def test_waiting_calls_are_bounded_and_expire(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(approvals_module, "MAX_APPROVALS", 2)
    monkeypatch.setattr(approvals_module, "MAX_CHARACTERS", 200)
    async with waiting(now) as approvals:
        ids = [await approvals.request("", TOOL, "{}") for _ in range(3)]
        with pytest.raises(ApiError, match="not found"):
            await approvals.claim("", approval_response(ids[0]))
        await approvals.claim("", approval_response(ids[1]))
        # An outcome counts; whoever is forgotten while it is claimed cannot run again.
        await approvals.release(ids[1], CallOutcome(text="x" * 200), final=False)
        with pytest.raises(ApiError, match="not found"):
            await approvals.claim("", approval_response(ids[1]))
        await approvals.release(ids[1], None, final=True)
        await approvals.claim("", approval_response(ids[2]))
        await approvals.release(ids[2], CallOutcome(text="y", failed=True), final=False)
        outcome = await approvals.claim("", approval_response(ids[2]))
        assert outcome == CallOutcome(text="y", failed=True)
        await approvals.release(ids[2], None, final=False)
        now[0] = 11.0
        with pytest.raises(ApiError, match="not found"):
            await approvals.claim("", approval_response(ids[2]))


async def test_only_one_of_several_routers_claims_a_call(tmp_path: Path) -> None:
    path = tmp_path / "router.sqlite3"
    async with waiting([0.0], path) as one, waiting([0.0], path) as other:
        approval_id = await one.request("", TOOL, "{}")
        claims = (router.claim("", approval_response(approval_id)) for router in (one, other))
        claimed = await asyncio.gather(*claims, return_exceptions=True)
        assert sorted(str(each)[:15] for each in claimed) == ["Another request", "None"]
        await one.release(approval_id, CallOutcome(text="done"), final=False)
        assert await other.claim("", approval_response(approval_id)) == CallOutcome(text="done")
        await other.release(approval_id, None, final=True)
        with pytest.raises(RequestError, match="already been answered"):
            await one.claim("", approval_response(approval_id))


async def test_a_request_that_is_cancelled_while_it_claims_gives_all_back() -> None:
    async with waiting([0.0]) as approvals:
        replies = [approval_response(await approvals.request("", TOOL, "{}")) for _ in range(3)]

        async def request() -> None:
            async with RequestApprovals(approvals, "", replies):
                await asyncio.Event().wait()

        task = asyncio.create_task(request())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        for reply in replies:
            await approvals.claim("", reply)
