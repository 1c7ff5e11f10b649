"""Access checks as dependencies of routes, documented in /openapi.json."""

from __future__ import annotations

from typing import Any

from fastapi import Depends, Request, Security
from fastapi.openapi.models import APIKey, APIKeyIn, HTTPBearer
from fastapi.security.base import SecurityBase

from .services import Exchange, RouterServices


class _ApiKey(SecurityBase):
    """Checks the key of a request, if the router requires keys."""

    def __init__(self) -> None:
        self.model = HTTPBearer(description="A key of --api-key or --api-key-file.")
        self.scheme_name = "ApiKey"

    async def __call__(self, request: Request) -> None:
        request.state.services.access.check_key(request.state.exchange)


class _AdminKey(SecurityBase):
    """Checks that the key of a request is an admin's."""

    def __init__(self) -> None:
        self.model = HTTPBearer(description="A key of --admin-api-key or --admin-api-key-file.")
        self.scheme_name = "AdminKey"

    async def __call__(self, request: Request) -> None:
        request.state.services.access.check_admin(request.state.exchange)


class _KeyHeader(SecurityBase):
    """Documents the header of Anthropic's clients, which ``_ApiKey`` checks."""

    def __init__(self) -> None:
        self.model = APIKey.model_validate({"in": APIKeyIn.header, "name": "x-api-key"})
        self.scheme_name = "KeyHeader"

    async def __call__(self) -> None:
        pass


async def _allowed_host(exchange: Exchange, services: RouterServices) -> None:
    services.access.check_host(exchange)


HOST_CHECKED: list[Any] = [Depends(_allowed_host)]
KEY_CHECKED: list[Any] = [*HOST_CHECKED, Security(_ApiKey()), Security(_KeyHeader())]
ADMIN_CHECKED: list[Any] = [*HOST_CHECKED, Security(_AdminKey()), Security(_KeyHeader())]
