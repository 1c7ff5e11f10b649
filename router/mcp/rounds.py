"""The loop of a request with tools of servers: generate, run the calls, generate again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from ..generation import (
    ChoiceDelta,
    ExecutedCall,
    GenerationRequest,
    Output,
    Outputs,
    Parsing,
    PromptRestarted,
    RequestAdmitted,
    ServerTool,
)
from ..requests.context import ContextError
from .server_tools import CallOutcome
from .turn import ModelTurn, TurnCall

MAX_CALLS_IN_ROUND = 32
NOT_RUN = "The call was not run: the request has reached its limit of calls. Answer without it."
RunCall = Callable[[ServerTool, str], Awaitable[CallOutcome]]


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """The rounds of one request. ``parse`` makes the request of a body; ``most_calls`` and
    ``most_rounds`` limit what the router runs."""

    body: dict[str, Any]
    tools: Mapping[str, ServerTool]
    listings: Sequence[Mapping[str, Any]]
    parse: Callable[[dict[str, Any]], GenerationRequest]
    run: RunCall
    most_rounds: int
    most_calls: int | None = None

    async def outputs(
        self,
        request: GenerationRequest,
        generate: Callable[[GenerationRequest], Outputs],
        parse: Parsing,
    ) -> Outputs:
        """The outputs of all generations as those of one: admitted once, finished once."""
        state = _Progress(self.body)
        while True:
            turn = ModelTurn(state.calls)
            async for arrived in _generated(request, generate, turn):
                if state.rounds:
                    arrived = [one for one in arrived if not isinstance(one, RequestAdmitted)]
                if arrived:
                    yield arrived
            mine = [call for call in turn.calls if call.name in self.tools]
            state.calls += len(turn.calls)
            if not mine or turn.finish_reason == "length":
                break
            executed = await self._run_all(mine, state)
            yield [ChoiceDelta(0, executed=executed)]
            if len(mine) < len(turn.calls):
                break  # the client runs the others
            following = await self._following(request, turn, executed, state, parse)
            if following is None:
                turn.finish_reason = "length"
                break
            request = following
        reason = turn.finish_reason
        if reason == "tool_calls" and len(mine) == len(turn.calls):
            reason = "stop"
        yield [ChoiceDelta(0, finish_reason=reason, stop_reason=turn.stop_reason)]

    async def _run_all(self, calls: Sequence[TurnCall], state: _Progress) -> list[ExecutedCall]:
        """Run the calls of one round, all at once."""
        left = MAX_CALLS_IN_ROUND
        if self.most_calls is not None:
            left = min(left, self.most_calls - state.executed)
        work = [self._run(call, allowed=i < left) for i, call in enumerate(calls)]
        state.executed += min(len(calls), max(0, left))
        return list(await asyncio.gather(*work))

    async def _run(self, call: TurnCall, *, allowed: bool) -> ExecutedCall:
        tool, arguments = self.tools[call.name], call.arguments.getvalue()
        outcome = CallOutcome(text=NOT_RUN, failed=True)
        if allowed:
            outcome = await self.run(tool, arguments)
        return ExecutedCall(
            id=call.id,
            tool=tool,
            arguments=arguments,
            output=None if outcome.failed else outcome.text,
            error=outcome.error(),
        )

    async def _following(
        self,
        request: GenerationRequest,
        turn: ModelTurn,
        executed: Sequence[ExecutedCall],
        state: _Progress,
        parse: Parsing,
    ) -> GenerationRequest | None:
        """The request of the next round; ``None`` if no more tokens may be generated."""
        state.rounds += 1
        exhausted = self.most_calls is not None and state.executed >= self.most_calls
        state.add(turn, executed, answer=exhausted or state.rounds >= self.most_rounds)
        if not state.has_tokens_left(turn.tokens):
            return None
        try:
            parsed = await parse(lambda: self.parse(state.body))
        except ContextError:
            return None
        name = f"{request.request_id.partition('.')[0]}.{state.rounds}"
        return replace(parsed, request_id=name, stream=request.stream)


@dataclass
class _Progress:
    """The body of the next round, and what has been used so far."""

    body: dict[str, Any]
    rounds: int = 0
    calls: int = 0
    executed: int = 0

    def add(self, turn: ModelTurn, executed: Sequence[ExecutedCall], *, answer: bool) -> None:
        """Continue the chat; the model has to ``answer`` if no more calls may be run."""
        messages = [*self.body["messages"], turn.message(), *map(_result, executed)]
        self.body = self.body | {
            "messages": messages,
            "tool_choice": "none" if answer else _free(self.body.get("tool_choice")),
            # Of the first prompt only.
            "add_generation_prompt": None,
            "continue_final_message": None,
            "echo": None,
            "prompt_logprobs": None,
        }

    def has_tokens_left(self, used: int) -> bool:
        for name in ("max_completion_tokens", "max_tokens"):
            if isinstance(most := self.body.get(name), (int, float)):
                self.body = self.body | {name: int(most) - used}
                if most <= used:
                    return False
        return True


async def _generated(
    request: GenerationRequest, generate: Callable[[GenerationRequest], Outputs], turn: ModelTurn
) -> Outputs:
    """The outputs of one generation, without its finish. Those of an answer that is not streamed
    are held back until its end: another node may start again."""
    held: list[Output] = []
    async with aclosing(generate(request)) as outputs:
        async for arrived in outputs:
            taken = []
            for output in arrived:
                if isinstance(output, PromptRestarted):
                    held.clear()
                    turn.restart()
                else:
                    taken.append(turn.take(output) if isinstance(output, ChoiceDelta) else output)
            if request.stream:
                yield taken
            else:
                held += taken
    if held:
        yield held


def _result(call: ExecutedCall) -> dict[str, Any]:
    text = call.output
    if text is None:
        error = call.error or {}
        parts = [part["text"] for part in error.get("content", ())]
        text = "Error: " + ("\n".join(parts) or str(error.get("message", "")))
    return {"role": "tool", "tool_call_id": call.id, "content": text}


def _free(choice: Any) -> Any:
    """The choice of later rounds: a call is demanded once."""
    if not isinstance(choice, dict) or choice.get("type") != "allowed_tools":
        return None
    return choice | {"allowed_tools": choice["allowed_tools"] | {"mode": "auto"}}
