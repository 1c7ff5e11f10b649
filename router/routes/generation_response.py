"""The response of routes that generate text."""

from __future__ import annotations

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..handler import GenerateHandler
from ..http.exchange import HttpExchange
from ..surface import Surface


class GenerationResponse(Response):
    """A response that is generated while it is written.

    It is written to the server's own ``send``: the frameworks' wrappers would add three calls to
    each token.
    """

    def __init__(self, exchange: HttpExchange, handler: GenerateHandler, surface: Surface) -> None:
        super().__init__()
        self._exchange = exchange
        self._handler = handler
        self._surface = surface

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._handler.handle(self._exchange, self._surface)
