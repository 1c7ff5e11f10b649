"""The daemon thread in which the Python API's engine runs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

from ...config import EngineConfig
from ...errors import StartupError, UnavailableError
from ...text.tokenizer import Tokenizer
from ...weights.source import open_source
from ..start import NodeIdentity, start_engine
from .request_runner import RequestRunner

log = logging.getLogger(__name__)

T = TypeVar("T")

CLOSE_SECONDS = 60.0
# A call gives up this long after the engine should have ended it with its own, better error.
GRACE_SECONDS = 5.0


class EngineThread:
    """A thread with an asyncio loop of its own. Owns the engine from start to close."""

    def __init__(self, config: EngineConfig) -> None:
        self.runner: RequestRunner  # once started
        self._config = config
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None  # set while work is accepted
        self._stop: Callable[[], object] = lambda: None
        self._end_reason = "it was closed"
        self._started: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="tandem-engine", daemon=True)

    def start(self) -> None:
        limit = self._config.start_timeout
        self._thread.start()
        try:
            self._started.result(limit)
        except TimeoutError:
            self.close()
            raise StartupError(f"the engine did not start within {limit:g} s") from None
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._stop()
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            log.error("the engine did not end within %g s", CLOSE_SECONDS)

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run ``work`` on the loop. The future of accepted work always ends."""
        with self._lock:
            if self._loop is not None:
                return asyncio.run_coroutine_threadsafe(work, self._loop)
        work.close()
        raise UnavailableError(f"the engine has stopped: {self._end_reason}")

    def result(self, future: Future[T], timeout: float) -> T:
        try:
            return future.result(timeout + GRACE_SECONDS)
        except CancelledError:
            raise UnavailableError(f"the engine has stopped: {self._end_reason}") from None
        except TimeoutError:
            raise UnavailableError(f"no result within {timeout:g} s; see timeout=") from None

    def call(self, work: Coroutine[Any, Any, T], timeout: float) -> T:
        """Run ``work`` on the loop and wait for its result; a caller that leaves cancels it."""
        future = self.submit(work)
        try:
            return self.result(future, timeout)
        finally:
            future.cancel()

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except asyncio.CancelledError:
            pass  # closed
        except BaseException as error:
            self._end_reason = str(error) or type(error).__name__
            if self._started.done():
                log.exception("the engine has failed")
            else:
                self._started.set_exception(error)

    async def _main(self) -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def stop() -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended by itself
                loop.call_soon_threadsafe(task.cancel)

        self._stop = stop
        identity = NodeIdentity("python-api", secrets.randbits(63))
        engine = await start_engine(self._config, identity, on_lost=self._on_lost)
        try:
            tokenizer = Tokenizer.load(open_source(engine.model_path).tokenizer_files())
            self.runner = RequestRunner(engine, tokenizer, self._config.max_waiting)
            with self._lock:
                self._loop = loop
            self._started.set_result(None)
            await engine.core.run()
        finally:
            with self._lock:
                self._loop = None
            await asyncio.sleep(0)  # accepted work becomes a task, to be cancelled
            await engine.ranks.stop()

    def _on_lost(self, reason: str) -> None:
        self._end_reason = reason
