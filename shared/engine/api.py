"""The engine as a Python object: prompts in, text out, no server.

``Engine`` is the caller's side: plain blocking calls, from any thread. ``_Service`` is the engine's
side: it lives on a private asyncio loop in a daemon thread, beside the core that it feeds. Nothing
but futures and finished deltas crosses between them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import secrets
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, TypeVar

from ..config import EngineConfig
from ..errors import RequestError, StartupError, UnavailableError, UsageError
from ..text.stop import StopMatcher
from ..text.tokenizer import Tokenizer
from .plan import PositionLogprobs
from .request import build_sequences
from .sampling_params import SamplingParams, check_params
from .sequence import FinishReason, StepOutput
from .sequence import Sequence as EngineSequence
from .start import NodeEngine, NodeIdentity, start_engine

log = logging.getLogger(__name__)

T = TypeVar("T")

CLOSE_SECONDS = 60.0
DEFAULT_TIMEOUT = 3600.0
# A call gives up this long after the engine should have ended it with its own, better error.
GRACE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a chat."""

    role: str
    content: str


Messages = Sequence[Message | Mapping[str, Any]]
Prompt = str | Sequence[int] | Messages


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """New output of one choice. ``finish_reason`` ("stop" or "length") comes once, with the last.

    ``stop_reason`` is the stop string or the stop token id that ended it, if one did.
    """

    index: int = 0
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One choice, whole. The token that ended it is listed, but adds no text."""

    index: int
    text: str
    tokens: list[int]
    logprobs: list[PositionLogprobs]
    finish_reason: str
    stop_reason: str | int | None
    prompt_tokens: int
    cached_tokens: int
    prompt_logprobs: list[PositionLogprobs]


class Engine:
    """A model on its ranks, called from Python. ``with Engine(config) as engine: ...``

    Errors are those of ``shared.errors``: a wrong prompt or parameter is a ``RequestError``, an
    engine that is not running or has lost its ranks an ``UnavailableError``.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self._host: _Host | None = None

    def start(self) -> None:
        """Load the model. Raises ``ModelError`` or ``StartupError``; nothing is left running."""
        if self._host is not None:
            raise UsageError("this engine is already running")
        host = _Host(self.config)
        host.start()
        self._host = host

    def close(self) -> None:
        """End the ranks; calls in progress fail with ``UnavailableError``. Idempotent."""
        host, self._host = self._host, None
        if host is not None:
            host.close()

    def __enter__(self) -> Engine:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def generate_sync(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        timeout: float = DEFAULT_TIMEOUT,
    ) -> list[list[Completion]]:
        """For each prompt (text, token ids, or the messages of a chat) its ``n`` completions.

        All run in one batch. One wrong prompt fails the call, and ``timeout`` seconds end it.
        """
        host = self._running()
        requests = [
            _request(host.service.tokenizer, prompt, wanted)
            for prompt, wanted in zip(*_pairs(prompts, params), strict=True)
        ]
        future = host.submit(host.service.serve_all(requests, timeout))
        try:
            return host.result(future, timeout)
        finally:
            future.cancel()

    def generate_stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        timeout: float = DEFAULT_TIMEOUT,
    ) -> Iterator[Delta]:
        """The output of one prompt as it is generated; choices are told apart by ``index``.

        Work begins with the first delta asked for. Closing the iterator early, or dropping it,
        cancels the generation.
        """
        host = self._running()
        request = _request(host.service.tokenizer, prompt, params or SamplingParams())
        return _stream(host, request, timeout)

    def apply_chat_template(
        self,
        messages: Messages,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **template_kwargs: Any,
    ) -> list[int]:
        """The prompt of a chat as token ids, which ``generate_sync`` and ``generate_stream`` take.

        Not as text: in text, what looks like a control token is text.
        """
        return self._running().service.tokenizer.encode_chat(
            _plain(messages),
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            template_kwargs=template_kwargs,
        )

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer, for counting and showing tokens."""
        return self._running().service.tokenizer

    def _running(self) -> _Host:
        if self._host is None:
            raise UnavailableError("this engine is not running; use `with Engine(...)` or start()")
        return self._host


def _stream(host: _Host, request: _Request, timeout: float) -> Iterator[Delta]:
    # Bounded by n x max_tokens small deltas: a caller that stalls cannot grow it further.
    deltas: queue.SimpleQueue[Delta | None] = queue.SimpleQueue()
    request.on_delta = deltas.put
    future = host.submit(host.service.serve(request, timeout))
    future.add_done_callback(lambda _: deltas.put(None))
    try:
        while (delta := _next(deltas, timeout)) is not None:
            yield delta
        host.result(future, timeout)
    finally:
        future.cancel()


def _next(deltas: queue.SimpleQueue[Delta | None], timeout: float) -> Delta | None:
    try:
        return deltas.get(timeout=timeout + GRACE_SECONDS)
    except queue.Empty:
        return None


class _Host:
    """The daemon thread with its loop. Owns the engine from start to close."""

    def __init__(self, config: EngineConfig) -> None:
        self.service: _Service
        self._config = config
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None  # set while work is accepted
        self._stop: Callable[[], object] = lambda: None
        self._ended = "it was closed"
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
        """Run ``work`` on the loop. What is accepted here always ends its future."""
        with self._lock:
            if self._loop is not None:
                return asyncio.run_coroutine_threadsafe(work, self._loop)
        work.close()
        raise UnavailableError(f"the engine has stopped: {self._ended}")

    def result(self, future: Future[T], timeout: float) -> T:
        try:
            return future.result(timeout + GRACE_SECONDS)
        except CancelledError:
            raise UnavailableError(f"the engine has stopped: {self._ended}") from None
        except TimeoutError:
            raise UnavailableError(f"no answer within {timeout:g} s; see timeout=") from None

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except asyncio.CancelledError:
            pass  # closed
        except BaseException as error:
            self._ended = str(error) or type(error).__name__
            if self._started.done():
                log.exception("the engine has failed")
            else:
                self._started.set_exception(error)

    async def _main(self) -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def stop() -> None:
            with contextlib.suppress(RuntimeError):  # it has ended by itself
                loop.call_soon_threadsafe(task.cancel)

        self._stop = stop
        identity = NodeIdentity("python-api", secrets.randbits(63))
        engine = await start_engine(self._config, identity, on_lost=self._lost)
        try:
            self.service = _Service(engine, Tokenizer.load(engine.folder), self._config.max_waiting)
            with self._lock:
                self._loop = loop
            self._started.set_result(None)
            await engine.core.run()
        finally:
            with self._lock:
                self._loop = None
            await asyncio.sleep(0)  # what was accepted until now becomes a task, to be cancelled
            await engine.ranks.stop()

    def _lost(self, reason: str) -> None:
        self._ended = reason


@dataclass(slots=True, eq=False)
class _Request:
    """One prompt in tokens, and who hears of its deltas."""

    tokens: list[int]
    params: SamplingParams
    on_delta: Callable[[Delta], None] = lambda delta: None


class _Service:
    """Runs requests on the core. Everything here happens on the engine's loop.

    ``max_alive`` sequences at most are in the scheduler at once; further requests wait here.
    """

    def __init__(self, engine: NodeEngine, tokenizer: Tokenizer, max_alive: int) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self._max_alive = max_alive
        self._alive = 0
        self._room = asyncio.Condition()

    async def serve_all(self, requests: list[_Request], timeout: float) -> list[list[Completion]]:
        """All or nothing: the first failure cancels the others."""
        tasks = [asyncio.create_task(self.serve(request, timeout)) for request in requests]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def serve(self, request: _Request, timeout: float) -> list[Completion]:
        """One request, from waiting for room to its last token."""
        try:
            async with asyncio.timeout(timeout), self._place(request.params.n):
                return await self._generate(request)
        except TimeoutError:
            raise UnavailableError(
                f"the request took longer than {timeout:g} s; see timeout="
            ) from None

    @contextlib.asynccontextmanager
    async def _place(self, n: int) -> Any:
        async with self._room:
            await self._room.wait_for(lambda: not self._alive or self._alive + n <= self._max_alive)
            self._alive += n
        try:
            yield
        finally:
            self._alive -= n
            async with self._room:
                self._room.notify_all()

    async def _generate(self, request: _Request) -> list[Completion]:
        core = self.engine.core
        core.admit(len(request.tokens), request.params.max_tokens)
        sequences = build_sequences(
            core, request.tokens, request.params, vocab_size=self.engine.spec.vocab_size
        )
        choices = [_Choice(sequence, self.tokenizer) for sequence in sequences]
        outputs: asyncio.Queue[StepOutput] = asyncio.Queue()
        core.submit(sequences[0], outputs.put_nowait)
        try:
            while not all(choice.finish_reason for choice in choices):
                output = await outputs.get()
                choice = choices[output.sequence.index]
                for delta in choice.take(output):
                    request.on_delta(delta)
                if choice.finish_reason:
                    core.cancel(choice.sequence)
            return [choice.completion(sequences[0]) for choice in choices]
        finally:
            for sequence in sequences:
                core.cancel(sequence)


class _Choice:
    """One choice: its tokens become text, until the model or a stop string ends it."""

    def __init__(self, sequence: EngineSequence, tokenizer: Tokenizer) -> None:
        params = sequence.params
        self.sequence = sequence
        self.finish_reason: str | None = None
        self._stop_reason: str | int | None = None
        self._detokenizer = tokenizer.detokenizer()
        self._stops = StopMatcher(params.stop, include=params.include_stop_str_in_output)
        self._text: list[str] = []
        self._tokens: list[int] = []
        self._logprobs: list[PositionLogprobs] = []

    def take(self, output: StepOutput) -> Iterator[Delta]:
        """The deltas of one step; none once a stop string has ended the choice."""
        if self.finish_reason is not None:
            return
        if output.finish_reason is FinishReason.ERROR:
            raise UnavailableError(f"the generation failed: {output.sequence.error}")
        for position, token in enumerate(output.tokens):
            text = self._show(self._detokenizer.push(token))
            yield self._delta(text, [token], output.logprobs[position : position + 1])
            if self.finish_reason is not None:
                return
        if output.finish_reason is not None:
            yield self._end()

    def completion(self, leader: EngineSequence) -> Completion:
        """The whole choice, once it has ended."""
        assert self.finish_reason is not None
        return Completion(
            index=self.sequence.index,
            text="".join(self._text),
            tokens=self._tokens,
            logprobs=self._logprobs,
            finish_reason=self.finish_reason,
            stop_reason=self._stop_reason,
            prompt_tokens=len(leader.prompt),
            cached_tokens=leader.cached,
            prompt_logprobs=leader.prompt_logprobs,
        )

    def _end(self) -> Delta:
        """The engine has ended it: what was held back comes out, unless it completes a stop."""
        sequence = self.sequence
        ended_by = [] if sequence.stop_token is None else [sequence.stop_token]
        include = sequence.params.include_stop_str_in_output
        included = [self._detokenizer.push(token) for token in ended_by if include]
        text = self._show("".join((*included, self._detokenizer.flush())))
        if self.finish_reason is None:
            text += self._stops.flush()
            length = sequence.finish_reason is FinishReason.LENGTH
            self.finish_reason = "length" if length else "stop"
            if sequence.stop_token in sequence.params.stop_token_ids:
                self._stop_reason = sequence.stop_token
        return self._delta(text, ended_by, [])

    def _show(self, text: str) -> str:
        """As in vLLM, stop strings do not count before ``min_tokens``."""
        if len(self._tokens) < self.sequence.params.min_tokens:
            return text
        text = self._stops.push(text)
        if self._stops.matched is not None:
            self.finish_reason, self._stop_reason = "stop", self._stops.matched
        return text

    def _delta(self, text: str, tokens: list[int], logprobs: list[PositionLogprobs]) -> Delta:
        self._text.append(text)
        self._tokens += tokens
        self._logprobs += logprobs
        return Delta(
            index=self.sequence.index,
            text=text,
            tokens=tokens,
            logprobs=logprobs,
            finish_reason=self.finish_reason,
            stop_reason=self._stop_reason,
        )


def _pairs(
    prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
) -> tuple[list[Prompt], list[SamplingParams]]:
    """As many parameters as prompts. Raises ``RequestError``."""
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], (int, Message, Mapping))):
        raise RequestError(
            "generate_sync takes a list of prompts, but got a single one; put it in a list",
            param="prompts",
        )
    if params is None or isinstance(params, SamplingParams):
        return list(prompts), [params or SamplingParams()] * len(prompts)
    if len(params) != len(prompts):
        raise RequestError(
            f"there are {len(prompts)} prompts and {len(params)} SamplingParams; give one for "
            f"each, or one for all",
            param="params",
        )
    return list(prompts), list(params)


def _request(tokenizer: Tokenizer, prompt: Prompt, params: SamplingParams) -> _Request:
    stops = [None] if isinstance(params.stop, str) else params.stop
    if not all(isinstance(stop, str) and stop for stop in stops):
        raise RequestError(
            f"stop is {params.stop!r}; it must be a tuple of strings that are not empty",
            param="stop",
        )
    check_params(params)
    return _Request(_tokens(tokenizer, prompt), params)


def _tokens(tokenizer: Tokenizer, prompt: Prompt) -> list[int]:
    if isinstance(prompt, str):
        return tokenizer.encode(prompt)
    items = list(prompt)
    if all(isinstance(item, int) for item in items):
        return items  # type: ignore[return-value]
    if all(isinstance(item, (Message, Mapping)) for item in items):
        return tokenizer.encode_chat(_plain(items))  # type: ignore[arg-type]
    raise RequestError(
        "a prompt must be a string, a list of token ids, or a list of messages", param="prompt"
    )


def _plain(messages: Messages) -> list[Mapping[str, Any]]:
    return [
        {"role": item.role, "content": item.content} if isinstance(item, Message) else item
        for item in messages
    ]
