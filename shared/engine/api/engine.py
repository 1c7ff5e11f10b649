"""The engine as a Python object: prompts in, text out, no server.

``Engine`` is the caller's side: plain blocking calls, from any thread. ``RequestRunner`` is the
engine's side: it lives on the asyncio loop of ``EngineThread``, beside the core that it feeds. Only
futures and finished deltas cross between them.
"""

from __future__ import annotations

import queue
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

from ...config import EngineConfig
from ...errors import UnavailableError, UsageError
from ...models.spec import Pooling
from ...text.tokenizer import Tokenizer
from ..sampling_params import SamplingParams
from .embeddings import embedding_requests
from .engine_thread import GRACE_SECONDS, EngineThread
from .prompts import Request, paired, plain, request_of
from .types import Completion, Delta, Embedding, Messages, Prompt

DEFAULT_TIMEOUT = 3600.0


class Engine:
    """A model on its ranks, called from Python. ``with Engine(config) as engine: ...``

    Errors are those of ``shared.errors``: ``RequestError`` for an invalid prompt or parameter,
    ``UnavailableError`` for an engine that is not running or has lost its ranks.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self._thread: EngineThread | None = None

    def start(self) -> None:
        """Load the model. Raises ``ModelError`` or ``StartupError``; nothing is left running."""
        if self._thread is not None:
            raise UsageError("this engine is already running")
        thread = EngineThread(self.config)
        thread.start()
        self._thread = thread

    def close(self) -> None:
        """End the ranks; calls in progress fail with ``UnavailableError``. Idempotent."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.close()

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
        """The ``n`` completions of each prompt (text, token ids, or the messages of a chat).

        All run in one batch. One invalid prompt fails the call, and ``timeout`` seconds end it.
        """
        thread = self._running()
        requests = [
            request_of(thread.runner.tokenizer, prompt, wanted)
            for prompt, wanted in paired(prompts, params)
        ]
        return thread.call(thread.runner.generate_all(requests, timeout), timeout)

    def generate_stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        timeout: float = DEFAULT_TIMEOUT,
    ) -> Iterator[Delta]:
        """The output of one prompt as it is generated; ``index`` numbers its choices.

        Work begins with the first delta that is read. Closing the iterator early, or dropping it,
        cancels the generation.
        """
        thread = self._running()
        request = request_of(thread.runner.tokenizer, prompt, params or SamplingParams())
        return _stream(thread, request, timeout)

    def embed(
        self,
        prompts: Sequence[Prompt],
        *,
        pooling: Pooling | None = None,
        normalize: bool = True,
        timeout: float = DEFAULT_TIMEOUT,
    ) -> list[Embedding]:
        """One vector for each prompt: its final hidden state, scaled to length 1.

        ``pooling`` is the hidden state of the "last" token, of the first ("cls"), or the "mean"
        over all; by default what the model's files say. One invalid prompt fails the call, and
        ``timeout`` seconds end it.
        """
        thread = self._running()
        chosen = pooling or thread.runner.engine.spec.pooling
        requests = embedding_requests(thread.runner.tokenizer, prompts, chosen, normalize=normalize)
        return thread.call(thread.runner.embed_all(requests, timeout), timeout)

    def encode(
        self,
        prompts: Sequence[Prompt],
        *,
        pooling: Pooling | None = None,
        timeout: float = DEFAULT_TIMEOUT,
    ) -> list[Embedding]:
        """The final hidden states as the model computes them; see ``embed``."""
        return self.embed(prompts, pooling=pooling, normalize=False, timeout=timeout)

    def apply_chat_template(
        self,
        messages: Messages,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **template_kwargs: Any,
    ) -> list[int]:
        """The prompt of a chat as token ids, which ``generate_sync`` and ``generate_stream`` take.

        Not as text: control tokens in a text are not control tokens.
        """
        return self._running().runner.tokenizer.encode_chat(
            plain(messages),
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            template_kwargs=template_kwargs,
        )

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._running().runner.tokenizer

    def _running(self) -> EngineThread:
        if self._thread is None:
            raise UnavailableError("this engine is not running; use `with Engine(...)` or start()")
        return self._thread


def _stream(thread: EngineThread, request: Request, timeout: float) -> Iterator[Delta]:
    # Bounded by n x max_tokens small deltas: a caller that stalls cannot grow it further.
    deltas: queue.SimpleQueue[Delta | None] = queue.SimpleQueue()
    request.on_delta = deltas.put
    future = thread.submit(thread.runner.generate(request, timeout))
    future.add_done_callback(lambda _: deltas.put(None))
    try:
        while (delta := _next(deltas, timeout)) is not None:
            yield delta
        thread.result(future, timeout)
    finally:
        future.cancel()


def _next(deltas: queue.SimpleQueue[Delta | None], timeout: float) -> Delta | None:
    try:
        return deltas.get(timeout=timeout + GRACE_SECONDS)
    except queue.Empty:
        return None
