"""Responses that write to the server's own ``send``: the frameworks' wrappers of it would add three
calls to each token."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..handler import GenerateHandler, Work
from ..http.exchange import HttpExchange
from ..surface import Surface


class GenerationResponse(Response):
    """Text that is generated while it is written."""

    def __init__(self, exchange: HttpExchange, handler: GenerateHandler, surface: Surface) -> None:
        super().__init__()
        self._exchange = exchange
        self._handler = handler
        self._surface = surface

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._handler.handle(self._exchange, self._surface)


class EncodedResponse(Response):
    """A value that may be large, as for ``dump``: FastAPI would check and encode it at once."""

    def __init__(self, exchange: HttpExchange, value: dict[str, Any]) -> None:
        super().__init__()
        self._exchange = exchange
        self._value = value

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._exchange.respond_json(200, self._value)


class ComputedResponse(Response):
    """An answer that a thread computes from the body."""

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
