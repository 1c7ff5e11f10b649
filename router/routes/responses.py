"""Responses that write to uvicorn's ``send`` directly: Starlette's and FastAPI's wrappers would add
three function calls per token."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..handler import GenerateHandler, Work
from ..http.exchange import HttpExchange
from ..surface import Surface


class GenerationResponse(Response):
    """A response that is generated, and may be streamed."""

    def __init__(self, exchange: HttpExchange, handler: GenerateHandler, surface: Surface) -> None:
        super().__init__()
        self._exchange = exchange
        self._handler = handler
        self._surface = surface

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._handler.handle(self._exchange, self._surface)


class EncodedResponse(Response):
    """A value for ``dump`` that may be large. FastAPI would validate it and encode it at once."""

    def __init__(self, exchange: HttpExchange, value: dict[str, Any]) -> None:
        super().__init__()
        self._exchange = exchange
        self._value = value

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._exchange.respond_json(200, self._value)


class ComputedResponse(Response):
    """A response that a thread computes from the body."""

    def __init__(
        self,
        exchange: HttpExchange,
        handler: GenerateHandler,
        work: Work,
    ) -> None:
        super().__init__()
        self._exchange = exchange
        self._handler = handler
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._handler.compute(self._exchange, self._work)
