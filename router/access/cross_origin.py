"""CORS: which web pages of other origins may use this router from a browser."""

from __future__ import annotations

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from ...shared.config.fields import split_list
from ..options import RouterOptions

# Response headers that scripts may read, besides CORS's safelisted ones.
EXPOSED = (
    "retry-after",
    "x-request-id",
    *(
        f"x-ratelimit-{what}-{unit}"
        for unit in ("requests", "tokens")
        for what in ("limit", "remaining", "reset")
    ),
)


def with_cross_origin(app: ASGIApp, options: RouterOptions) -> ASGIApp:
    """``app`` with CORS headers, if the options name any origin."""
    origins = split_list("--allowed-origins", options.allowed_origins)
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=split_list("--allowed-methods", options.allowed_methods),
        allow_headers=split_list("--allowed-headers", options.allowed_headers),
        allow_credentials=options.allow_credentials,
        expose_headers=EXPOSED,
    )
