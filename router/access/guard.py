"""Access checks: host names and API keys."""

from __future__ import annotations

import base64

from ..errors import PERMISSION, ApiError
from ..http.exchange import HttpExchange, KeyOwner
from ..options import RouterOptions
from .api_keys import ApiKeys
from .hosts import AllowedHosts

# Opened in a browser, which prompts for a password if the challenge is Basic.
PAGES = ("/docs",)


class Access:
    """Checks requests; raises ``ApiError`` for those that are not allowed."""

    def __init__(self, options: RouterOptions) -> None:
        self._keys = ApiKeys(options)
        self._hosts = AllowedHosts(options)

    def check_host(self, exchange: HttpExchange) -> None:
        self._hosts.check(exchange.header(b"host"))

    def check_key(self, exchange: HttpExchange) -> None:
        """Check the key, if keys are required. It may be sent as Bearer, as x-api-key, or as the
        password of Basic, which browsers prompt for. The exchange keeps the owner, not the key."""
        if self._keys.required:
            exchange.set_owner(self._owner(exchange))

    def owner_named(self, name: str) -> KeyOwner:
        """The owner of stored objects, by name, for requests without a connection."""
        return self._keys.owner_named(name)

    def check_admin(self, exchange: HttpExchange) -> None:
        """Check that the request has an admin's key."""
        owner = self._owner(exchange) if self._keys.required or self._keys.has_admins else None
        if not self._keys.has_admins:
            message = "This route is off; start the router with --admin-api-key to use it."
            raise ApiError(403, message, kind=PERMISSION, code="no_admin_key")
        assert owner is not None
        exchange.set_owner(owner)
        if not owner.admin:
            message = "This route needs an admin key; see --admin-api-key of the router."
            raise ApiError(403, message, kind=PERMISSION, code="admin_key_required")

    def _owner(self, exchange: HttpExchange) -> KeyOwner:
        """The owner of the request's key. Raises ``ApiError`` 401."""
        key = _request_key(exchange)
        owner = self._keys.owner(key)
        if owner is None:
            challenge = b"Basic" if exchange.path in PAGES else b"Bearer"
            message = "Incorrect API key provided." if key else "You did not provide an API key."
            headers = ((b"www-authenticate", challenge + b' realm="tandem"'),)
            raise ApiError(401, message, code="invalid_api_key", headers=headers)
        return owner


def _request_key(exchange: HttpExchange) -> bytes:
    """The key of a request, or an empty string. Anthropic's clients send x-api-key."""
    scheme, _, credentials = exchange.header(b"authorization").partition(b" ")
    if scheme.lower() == b"basic":
        return _basic_password(credentials)
    return credentials if scheme.lower() == b"bearer" else exchange.header(b"x-api-key")


def _basic_password(encoded: bytes) -> bytes:
    try:
        return base64.b64decode(encoded, validate=True).partition(b":")[2]
    except ValueError:
        return b""
