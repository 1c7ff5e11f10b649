"""Grammars of requests, compiled in a thread, and kept for the requests that follow."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable

from ...errors import OverloadedError
from ...process.deep_thread import DeepThread
from .constraint import OutputRules
from .grammar import Grammar, GrammarBackend, GrammarError
from .params import GrammarKey, StructuredOutputs
from .thinking_budget import ThinkingBudget, ThinkingRule

COMPILE_SECONDS = 5.0
# Requests that wait for a grammar.
MAX_WAITING = 1024
# Constraints up to this length take milliseconds.
SMALL_CHARACTERS = 8 * 1024
MAX_KEPT = 64
# Of the constraints of kept grammars, which takes a few hundred times as much memory.
MAX_KEPT_CHARACTERS = 1 << 20


class GrammarCompiler:
    """The grammars of one model.

    ``load`` makes the backend; it fails for tokenizers that the library does not know. Small and
    large constraints have a thread each, so that a small one never waits for a large one.
    """

    def __init__(self, load: Callable[[], GrammarBackend]) -> None:
        self._load = load
        self._loading = threading.Lock()
        self._backend: GrammarBackend | None = None
        self._small = DeepThread("grammars")
        self._large = DeepThread("large-grammars")
        self._kept = KeptGrammars()
        self._waiting = 0

    async def prepare(self) -> None:
        """Make the backend, which takes a second for a large vocabulary. Python is blocked
        meanwhile, so it should be done before requests are served."""
        with contextlib.suppress(GrammarError):  # the first request that has a grammar reports it
            await self._small.run(self._loaded)

    async def rules(
        self, wanted: StructuredOutputs | None, thinking: ThinkingBudget | None
    ) -> OutputRules:
        """What the outputs of a request follow. Raises as ``compile`` does."""
        return OutputRules(
            None if wanted is None else await self.compile(wanted),
            None if thinking is None else await self._thinking_rule(thinking),
        )

    async def _thinking_rule(self, budget: ThinkingBudget) -> ThinkingRule:
        """Microseconds once there is a backend, so it never waits for grammars then."""
        try:
            if self._backend is None:
                await self._small.run(self._loaded)
            return ThinkingRule(budget, self._loaded())
        except GrammarError as error:
            raise budget.error(str(error)) from None

    async def compile(self, wanted: StructuredOutputs) -> Grammar:
        """Raises ``RequestError`` for a constraint that is invalid, that nothing satisfies, or that
        takes too long, and ``OverloadedError`` if its turn does not come."""
        key = wanted.key()
        if (kept := self._kept.get(key)) is not None:
            return kept
        if self._waiting >= MAX_WAITING:
            raise OverloadedError(f"{self._waiting} requests wait for a grammar; try again later")
        self._waiting += 1
        try:
            return await self._compiled(key)
        except GrammarError as error:
            raise wanted.error(str(error)) from None
        except TimeoutError:
            raise wanted.error(
                f"it was not compiled within {COMPILE_SECONDS:g} s; make it smaller or simpler"
            ) from None
        finally:
            self._waiting -= 1

    async def _compiled(self, key: GrammarKey) -> Grammar:
        begun = asyncio.Event()
        loop = asyncio.get_running_loop()

        def compiled() -> Grammar:
            loop.call_soon_threadsafe(begun.set)
            return self._kept.peek(key) or self._loaded().compile(key)

        thread = self._small if len(key.text) <= SMALL_CHARACTERS else self._large
        running = thread.run(compiled)
        try:
            await self._turn(begun)
            async with asyncio.timeout(COMPILE_SECONDS):
                grammar = await running
        finally:
            running.cancel()
        self._kept.add(key, grammar)
        return grammar

    async def _turn(self, begun: asyncio.Event) -> None:
        try:
            async with asyncio.timeout(COMPILE_SECONDS):
                await begun.wait()
        except TimeoutError:
            raise OverloadedError("other grammars are being compiled; try again later") from None

    def _loaded(self) -> GrammarBackend:
        with self._loading:
            if self._backend is None:
                self._backend = self._load()
            return self._backend


class KeptGrammars:
    """The grammars that were used last, within bounds."""

    def __init__(self) -> None:
        self._grammars: OrderedDict[GrammarKey, Grammar] = OrderedDict()
        self._characters = 0

    def __len__(self) -> int:
        return len(self._grammars)

    def get(self, key: GrammarKey) -> Grammar | None:
        if key in self._grammars:
            self._grammars.move_to_end(key)
        return self._grammars.get(key)

    def peek(self, key: GrammarKey) -> Grammar | None:
        """As ``get``, from another thread."""
        return self._grammars.get(key)

    def add(self, key: GrammarKey, grammar: Grammar) -> None:
        if key not in self._grammars:
            self._characters += len(key.text)
        self._grammars[key] = grammar
        while len(self._grammars) > MAX_KEPT or self._characters > MAX_KEPT_CHARACTERS:
            dropped, _ = self._grammars.popitem(last=False)
            self._characters -= len(dropped.text)
