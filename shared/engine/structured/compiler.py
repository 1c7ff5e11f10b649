"""Grammars of requests, compiled in threads and cached."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable

from ...errors import OverloadedError
from ...process.deep_thread import DeepThread
from ...text.tokenizer_files import TokenizerFiles
from .constraint import OutputRules
from .grammar import Grammar, GrammarBackend, GrammarError
from .params import GrammarKey, StructuredOutputs
from .thinking_budget import ThinkingBudget, ThinkingRule

COMPILE_SECONDS = 5.0
# The limit of requests that wait for a grammar.
MAX_WAITING = 1024
# Constraints up to this length compile within milliseconds.
SMALL_CHARACTERS = 8 * 1024
MAX_CACHED = 64
# Total length of the cached grammars' texts; a grammar takes a few hundred times its text's memory.
MAX_CACHED_CHARACTERS = 1 << 20


def load_backend(
    files: TokenizerFiles | None, vocab_size: int, end_tokens: Iterable[int]
) -> GrammarBackend:
    """The backend for a model's tokenizer. Raises ``GrammarError`` if there is none."""
    if files is None:
        raise GrammarError("the model has no tokenizer")
    try:  # on demand: ranks and prefill nodes need no grammars
        from .llguidance_backend import LLGuidanceBackend
    except ImportError:
        raise GrammarError("llguidance is not installed (pip install llguidance)") from None
    return LLGuidanceBackend(files, vocab_size, end_tokens)


class GrammarCompiler:
    """The grammars of one model.

    ``load`` creates the backend, or raises ``GrammarError``. Small and large constraints have a
    thread each, so that a small one never waits for a large one.
    """

    def __init__(self, load: Callable[[], GrammarBackend]) -> None:
        self._load = load
        self._loading = threading.Lock()
        self._backend: GrammarBackend | None = None
        self._small = DeepThread("grammars")
        self._large = DeepThread("large-grammars")
        self._cache = GrammarCache()
        self._waiting = 0

    async def prepare(self) -> None:
        """Create the backend, which takes a second for a large vocabulary and blocks Python, so it
        should precede the first request."""
        with contextlib.suppress(GrammarError):  # reported to the first request with a grammar
            await self._small.run(self._get_backend)

    async def rules(
        self, constraint: StructuredOutputs | None, thinking: ThinkingBudget | None
    ) -> OutputRules:
        """The rules for the outputs of a request. Raises like ``compile``."""
        return OutputRules(
            None if constraint is None else await self.compile(constraint),
            None if thinking is None else await self._thinking_rule(thinking),
        )

    async def _thinking_rule(self, budget: ThinkingBudget) -> ThinkingRule:
        """Takes microseconds once there is a backend, so it does not wait for grammars then."""
        try:
            if self._backend is None:
                await self._small.run(self._get_backend)
            return ThinkingRule(budget, self._get_backend())
        except GrammarError as error:
            raise budget.error(str(error)) from None

    async def compile(self, constraint: StructuredOutputs) -> Grammar:
        """The grammar of a constraint. Raises ``RequestError`` if it is invalid, unsatisfiable or
        takes too long to compile, and ``OverloadedError`` if others take all the time."""
        key = constraint.key()
        if (grammar := self._cache.get(key)) is not None:
            return grammar
        if self._waiting >= MAX_WAITING:
            raise OverloadedError(f"{self._waiting} requests wait for a grammar; try again later")
        self._waiting += 1
        try:
            return await self._compile_in_turn(key)
        except GrammarError as error:
            raise constraint.error(str(error)) from None
        except TimeoutError:
            raise constraint.error(
                f"it was not compiled within {COMPILE_SECONDS:g} s; make it smaller or simpler"
            ) from None
        finally:
            self._waiting -= 1

    async def _compile_in_turn(self, key: GrammarKey) -> Grammar:
        started = asyncio.Event()
        loop = asyncio.get_running_loop()

        def work() -> Grammar:
            loop.call_soon_threadsafe(started.set)
            return self._cache.peek(key) or self._get_backend().compile(key)

        thread = self._small if len(key.text) <= SMALL_CHARACTERS else self._large
        running = thread.run(work)
        try:
            await self._turn(started)
            async with asyncio.timeout(COMPILE_SECONDS):
                grammar = await running
        finally:
            running.cancel()
        self._cache.add(key, grammar)
        return grammar

    async def _turn(self, started: asyncio.Event) -> None:
        try:
            async with asyncio.timeout(COMPILE_SECONDS):
                await started.wait()
        except TimeoutError:
            raise OverloadedError("other grammars are being compiled; try again later") from None

    def _get_backend(self) -> GrammarBackend:
        with self._loading:
            if self._backend is None:
                self._backend = self._load()
            return self._backend


class GrammarCache:
    """The most recently used grammars, within bounds."""

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
        """Like ``get``, from another thread."""
        return self._grammars.get(key)

    def add(self, key: GrammarKey, grammar: Grammar) -> None:
        if key not in self._grammars:
            self._characters += len(key.text)
        self._grammars[key] = grammar
        while len(self._grammars) > MAX_CACHED or self._characters > MAX_CACHED_CHARACTERS:
            dropped, _ = self._grammars.popitem(last=False)
            self._characters -= len(dropped.text)
