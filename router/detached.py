"""Requests whose clients do not wait for the response."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from ..shared.telemetry.logs import logger
from .errors import ApiError, internal_error, to_api_error
from .http.access_log import AccessRecord
from .http.key_owner import KeyOwner
from .options import RouterOptions
from .surface import BackgroundWork, HeldResponse

log = logger("router")


@dataclass
class DetachedRequest:
    """The part of a request that continues when its exchange has ended."""

    owner: KeyOwner
    access: AccessRecord
    headers: list[tuple[bytes, bytes]]


async def run_detached(
    held: ExitStack,
    work: BackgroundWork,
    response: HeldResponse,
    computed: Coroutine[Any, Any, None],
    options: RouterOptions,
    count_error: Callable[[int], None],
) -> None:
    """Wait until the response is ``computed``, and tell it how it ended. ``held`` are the limits
    within which it runs."""
    with held:
        try:
            await computed
        except asyncio.CancelledError:
            response.abandoned(None)
        except Exception as error:
            failure = _failure(error, options)
            work.access.error = failure.code or failure.kind
            count_error(failure.status)
            response.abandoned(failure)
        finally:
            work.ended()
            if options.access_log:
                work.access.log()


def _failure(error: Exception, options: RouterOptions) -> ApiError:
    failure = to_api_error(error, retry_after=options.retry_after)
    if failure is None:
        log.error("a request in the background failed", exc_info=error)
        failure = internal_error()
    return failure
