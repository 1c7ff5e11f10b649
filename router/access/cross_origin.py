"""Scripts of other origins: which web pages may call this router from a browser (CORS)."""

from __future__ import annotations

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from ...shared.config.fields import split_list
from ..options import RouterOptions

# Headers that scripts may read, besides those that every script may.
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
    """``app`` with the headers that browsers ask for, if the options name any origin."""
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
