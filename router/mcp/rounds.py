"""The loop of a request with tools of servers: generate, run the calls, generate again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence, Set
from contextlib import AbstractContextManager, aclosing, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from ...shared.text.output import CallDelta
from ..generation import ChoiceDelta, Generate, Outputs, RequestAdmitted
from ..openai.chat_request import ChatRequest
from ..requests.context import ContextError
from ..requests.mcp_tools import model_name
from .approvals import ApprovalResponse
from .request_approvals import RequestApprovals
from .round_delta import ApprovalRequest, ExecutedCall, RoundDelta
from .server_tools import CallOutcome, ServerTool
from .turn import ModelTurn, TurnCall

MAX_CALLS_IN_ROUND = 32
NOT_RUN = "The call was not run: the request has reached its limit of calls. Answer without it."
# Parses a request in another thread.
Parsing = Callable[[Callable[[], ChatRequest]], Awaitable[ChatRequest]]
RunCall = Callable[[ServerTool, str], Coroutine[Any, Any, CallOutcome]]


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """The rounds of one request. ``parse`` makes a request from a body; ``max_calls`` and
    ``max_rounds`` limit the calls that the router runs. ``guarded`` tools need an approval."""

    body: dict[str, Any]
    tools: Mapping[str, ServerTool]
    guarded: Set[str]
    approvals: RequestApprovals | None
    listings: Sequence[Mapping[str, Any]]
    parse: Callable[[dict[str, Any]], ChatRequest]
    run: RunCall
    max_rounds: int
    max_calls: int | None = None

    @cached_property
    def approved(self) -> Mapping[str, ApprovalResponse]:
        """The approved calls, by the ids of their approval requests."""
        responses = () if self.approvals is None else self.approvals.responses
        return {response.id: response for response in responses if response.approve}

    async def outputs(
        self,
        request: ChatRequest,
        generate: Generate,
        parsing: AbstractContextManager[Parsing],
    ) -> Outputs:
        """The outputs of all generations as those of a single one: admitted once, finished once."""
        state = _Progress(self.body)
        with parsing as parse:
            async with self.approvals or nullcontext():
                following: ChatRequest | None = request
                if self.approved:
                    calls = [_call_delta(i, call) for i, call in enumerate(self.approved.values())]
                    yield [RequestAdmitted(), ChoiceDelta(0, calls=calls)]
                    results = await self._run_approved(state)
                    yield [RoundDelta(0, executed_calls=results)]
                    resume = partial(state.resume, results)
                    following = await self._parsed(request, state, parse, resume)
                    if following is not None:
                        yield [RoundDelta(0, next_request=following)]
                last = ChoiceDelta(0, finish_reason="length")  # unless there is room for more
                while following is not None:
                    turn = ModelTurn(state.calls, self.guarded)
                    async with aclosing(generate(following)) as outputs:
                        async for batch in outputs:
                            if new_outputs := turn.take(batch, first=state.rounds == 0):
                                yield new_outputs
                    state.calls += len(turn.calls)
                    own = [call for call in turn.calls if call.name in self.tools]
                    last = turn.end(all_run=len(own) == len(turn.calls))
                    if not own or last.finish_reason == "length":
                        break
                    results = await self._run_all(own, state)
                    waiting = [
                        await self._request_approval(call)
                        for call in own
                        if call.name in self.guarded
                    ]
                    yield [RoundDelta(0, executed_calls=results, approval_requests=waiting)]
                    if waiting or len(own) < len(turn.calls):
                        break  # the client approves or runs the others
                    following = await self._following(request, turn, results, state, parse)
                    if following is None:
                        last.finish_reason = "length"
                    else:
                        yield [RoundDelta(0, next_request=following)]
                yield [last]
                if self.approvals is not None:
                    self.approvals.settle()

    async def _run_all(self, calls: Sequence[TurnCall], state: _Progress) -> list[ExecutedCall]:
        """Run the calls of one round that need no approval, concurrently."""
        calls = [call for call in calls if call.name not in self.guarded]
        allowed = self._take_calls(len(calls), state)
        work = []
        for i, call in enumerate(calls):
            tool, arguments = self.tools[call.name], call.arguments.getvalue()
            run = partial(self.run, tool, arguments) if i < allowed else _not_run
            work.append(_execute(call.id, tool, arguments, run()))
        return list(await asyncio.gather(*work))

    async def _run_approved(self, state: _Progress) -> list[ExecutedCall]:
        """Run the approved calls, concurrently."""
        assert self.approvals is not None
        allowed = self._take_calls(len(self.approved), state)
        work = []
        for i, call in enumerate(self.approved.values()):
            run = partial(self.run, call.tool, call.arguments)
            outcome = self.approvals.run(call.id, run) if i < allowed else _not_run()
            work.append(_execute(call.id, call.tool, call.arguments, outcome))
        return list(await asyncio.gather(*work))

    def _take_calls(self, count: int, state: _Progress) -> int:
        """The number of ``count`` calls that may run."""
        limit = MAX_CALLS_IN_ROUND
        if self.max_calls is not None:
            limit = min(limit, self.max_calls - state.executed)
        allowed = min(count, max(0, limit))
        state.executed += allowed
        return allowed

    async def _request_approval(self, call: TurnCall) -> ApprovalRequest:
        assert self.approvals is not None
        tool, arguments = self.tools[call.name], call.arguments.getvalue()
        return ApprovalRequest(
            id=await self.approvals.request(tool, arguments), tool=tool, arguments=arguments
        )

    async def _following(
        self,
        request: ChatRequest,
        turn: ModelTurn,
        executed: Sequence[ExecutedCall],
        state: _Progress,
        parse: Parsing,
    ) -> ChatRequest | None:
        """The request of the next round; ``None`` if no tokens remain."""
        if not state.has_tokens_left(turn.tokens):
            return None
        return await self._parsed(request, state, parse, lambda: state.add(turn, executed))

    async def _parsed(
        self,
        request: ChatRequest,
        state: _Progress,
        parse: Parsing,
        extend: Callable[[], None],
    ) -> ChatRequest | None:
        """The request of the next round; ``None`` if it does not fit into the context. ``extend``
        adds to the chat what has happened since the last request."""
        state.rounds += 1
        exhausted = self.max_calls is not None and state.executed >= self.max_calls
        last = exhausted or state.rounds >= self.max_rounds

        def work() -> ChatRequest:
            extend()
            if last:
                state.body = state.body | {"tool_choice": "none"}
            return self.parse(state.body)

        try:
            parsed = await parse(work)
        except ContextError:
            return None
        root = request.request_id.partition(".")[0]  # of the first round
        name = f"{root}.{state.rounds}"
        return replace(parsed, request_id=name, stream=request.stream)


@dataclass
class _Progress:
    """The body of the next round, and the use of limits so far."""

    body: dict[str, Any]
    rounds: int = 0
    calls: int = 0
    executed: int = 0

    def resume(self, executed: Sequence[ExecutedCall]) -> None:
        """Add the results of calls that the chat already has."""
        self.calls = len(executed)
        results = {call.id: _result(call) for call in executed}
        messages = [results.get(m.get("tool_call_id"), m) for m in self.body["messages"]]
        self.body = self.body | {"messages": messages}

    def add(self, turn: ModelTurn, executed: Sequence[ExecutedCall]) -> None:
        """Add a turn and the results of its calls."""
        messages = [*self.body["messages"], turn.message(), *map(_result, executed)]
        self.body = self.body | {
            "messages": messages,
            "tool_choice": _free(self.body.get("tool_choice")),
            # These apply to the first prompt only.
            "add_generation_prompt": None,
            "continue_final_message": None,
            "echo": None,
            "prompt_logprobs": None,
        }

    def has_tokens_left(self, used: int) -> bool:
        for name in ("max_completion_tokens", "max_tokens"):
            if isinstance(limit := self.body.get(name), (int, float)):
                self.body = self.body | {name: int(limit) - used}
                if limit <= used:
                    return False
        return True


def _call_delta(index: int, call: ApprovalResponse) -> CallDelta:
    name = model_name(call.tool.label, call.tool.name)
    return CallDelta(index, call.id, name, call.arguments)


async def _not_run() -> CallOutcome:
    return CallOutcome(text=NOT_RUN, failed=True)


async def _execute(
    call_id: str, tool: ServerTool, arguments: str, run: Coroutine[Any, Any, CallOutcome]
) -> ExecutedCall:
    outcome = await run
    return ExecutedCall(
        id=call_id,
        tool=tool,
        arguments=arguments,
        output=None if outcome.failed else outcome.text,
        error=outcome.error(),
    )


def _result(call: ExecutedCall) -> dict[str, Any]:
    text = call.output
    if text is None:
        error = call.error or {}
        parts = [part["text"] for part in error.get("content", ())]
        text = "Error: " + ("\n".join(parts) or str(error.get("message", "")))
    return {"role": "tool", "tool_call_id": call.id, "content": text}


def _free(choice: Any) -> Any:
    """The ``tool_choice`` of later rounds: a call is forced only once."""
    if not isinstance(choice, dict) or choice.get("type") != "allowed_tools":
        return None
    return choice | {"allowed_tools": choice["allowed_tools"] | {"mode": "auto"}}
