"""Who may call the router: allowed host names, and API keys."""

from __future__ import annotations

import base64

from ..errors import ApiError
from ..options import RouterOptions
from .api_keys import ApiKeys
from .exchange import HttpExchange
from .hosts import AllowedHosts


class Access:
    """Raises ``ApiError`` for requests that may not be served."""

    def __init__(self, options: RouterOptions) -> None:
        self._keys = ApiKeys(options)
        self._hosts = AllowedHosts(options)

    def check_host(self, exchange: HttpExchange) -> None:
        self._hosts.check(exchange.header(b"host"))

    def check_key(self, exchange: HttpExchange) -> None:
        """Accept a key as Bearer, as x-api-key, or as the password of Basic, which browsers can ask
        for. The exchange keeps the name of its owner, never the key."""
        if not self._keys.required:
            return
        given = _given_key(exchange)
        owner = self._keys.owner(given)
        if owner is None:
            challenge = b"Basic" if exchange.path == "/" else b"Bearer"
            message = "Incorrect API key provided." if given else "You did not provide an API key."
            headers = ((b"www-authenticate", challenge + b' realm="tandem"'),)
            raise ApiError(401, message, code="invalid_api_key", headers=headers)
        exchange.access.key = owner


def _given_key(exchange: HttpExchange) -> bytes:
    """The key of a request; empty if there is none. Anthropic's clients have a header of their
    own."""
    scheme, _, given = exchange.header(b"authorization").partition(b" ")
    if scheme.lower() == b"basic":
        return _basic_password(given)
    return given if scheme.lower() == b"bearer" else exchange.header(b"x-api-key")


def _basic_password(encoded: bytes) -> bytes:
    try:
        return base64.b64decode(encoded, validate=True).partition(b":")[2]
    except ValueError:
        return b""
