"""The engine as a Python object: prompts in, text out, no server.

``Engine`` is the caller's side: plain blocking calls, from any thread. ``RequestRunner`` is the
engine's side: it lives on the asyncio loop of ``EngineThread``, beside the core that it feeds. Only
futures and finished deltas pass between them.
"""

from __future__ import annotations

import queue
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

from ...config import EngineConfig
from ...errors import RequestError, UnavailableError, UsageError
from ...models.spec import Pooling
from ...text.tokenizer import Tokenizer, max_tokens_before_cut
from ..sampling_params import SamplingParams
from .embeddings import (
    PoolingRequest,
    classification_of,
    classification_requests,
    cosine,
    embedding_of,
    embedding_requests,
    score_of,
    text_pairs,
)
from .engine_thread import GRACE_SECONDS, EngineThread
from .prompts import Request, paired, plain, request_of
from .types import Classification, Completion, Delta, Embedding, Messages, Prompt, Score

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
            request_of(thread.runner.tokenizer, prompt, sampling)
            for prompt, sampling in paired(prompts, params)
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
        truncate_prompt_tokens: int | None = None,
        timeout: float = DEFAULT_TIMEOUT,
    ) -> list[Embedding]:
        """One vector for each prompt: its final hidden state, scaled to length 1.

        ``pooling`` is the hidden state of the "last" token, of the first ("cls"), or the "mean"
        over all; by default the model's own. A longer prompt is cut to its first
        ``truncate_prompt_tokens`` (-1: the model's limit); the special tokens around a text stay.
        One invalid prompt fails the call, and ``timeout`` seconds end it.
        """
        thread = self._running()
        runner = thread.runner
        runner.engine.check_embeds()
        pooling = pooling or runner.engine.spec.pooling
        cut = self._cut(truncate_prompt_tokens)
        requests = embedding_requests(runner.tokenizer, prompts, pooling, cut)
        sequences = thread.call(runner.pool_all(requests, timeout), timeout)
        return [embedding_of(sequence, normalize=normalize) for sequence in sequences]

    def encode(
        self,
        prompts: Sequence[Prompt],
        *,
        pooling: Pooling | None = None,
        truncate_prompt_tokens: int | None = None,
        timeout: float = DEFAULT_TIMEOUT,
    ) -> list[Embedding]:
        """The final hidden states as the model computes them; see ``embed``."""
        return self.embed(
            prompts,
            pooling=pooling,
            normalize=False,
            truncate_prompt_tokens=truncate_prompt_tokens,
            timeout=timeout,
        )

    def score(
        self,
        texts_1: str | Sequence[str],
        texts_2: str | Sequence[str],
        *,
        instruction: str | None = None,
        use_activation: bool = True,
        truncate_prompt_tokens: int | None = None,
        timeout: float = DEFAULT_TIMEOUT,
    ) -> list[Score]:
        """A score for each pair: of one text with each of many, or of two equally long lists.

        A model with a classifier of one label reads both texts of a pair (a query and a document)
        together: in its template, if it has one, after an ``instruction``. Its scores are logits
        unless ``use_activation``. A pair with more than ``truncate_prompt_tokens`` (-1: the model's
        limit) loses tokens of its longer text. With an embedding model, a score is the cosine of
        both texts' vectors; each text is cut by itself, and the other options are rejected.
        """
        thread = self._running()
        engine, pairs = thread.runner.engine, text_pairs(texts_1, texts_2)
        engine.check_scores()
        if engine.spec.classifier is None:
            if instruction or not use_activation:
                raise RequestError(
                    "instruction and use_activation are for models with a classifier; this one "
                    "scores by the vectors of texts"
                )
            texts = list(dict.fromkeys(text for pair in pairs for text in pair))
            prompt = thread.runner.tokenizer.prompts.default
            vectors = self.embed(
                [prompt + text for text in texts],
                truncate_prompt_tokens=truncate_prompt_tokens,
                timeout=timeout,
            )
            by_text = dict(zip(texts, vectors, strict=True))
            return [cosine(by_text[first], by_text[second]) for first, second in pairs]
        cut = self._cut(truncate_prompt_tokens)
        requests = [self._pair_request(pair, instruction, cut) for pair in pairs]
        sequences = thread.call(thread.runner.pool_all(requests, timeout), timeout)
        activation = engine.spec.classifier.activation if use_activation else "none"
        return [score_of(sequence, activation) for sequence in sequences]

    def _pair_request(
        self, pair: tuple[str, str], instruction: str | None, limit: int | None
    ) -> PoolingRequest:
        runner = self._running().runner
        engine, context = runner.engine, runner.engine.resolved.max_model_len
        max_tokens = context if limit is None else max_tokens_before_cut(context)
        tokens, second = runner.tokenizer.encode_pair(
            *pair, limit=limit, max_tokens=max_tokens, instruction=instruction
        )
        second = second if engine.spec.segments > 1 else 0
        return PoolingRequest(tokens, engine.scorer().pooling, True, second)

    def classify(
        self,
        prompts: Sequence[Prompt],
        *,
        truncate_prompt_tokens: int | None = None,
        timeout: float = DEFAULT_TIMEOUT,
    ) -> list[Classification]:
        """The scores of each prompt for the labels of a model with a classifier.
        ``truncate_prompt_tokens``: see ``embed``."""
        thread = self._running()
        scorer = thread.runner.engine.scorer()
        cut = self._cut(truncate_prompt_tokens)
        requests = classification_requests(thread.runner.tokenizer, prompts, scorer, cut)
        sequences = thread.call(thread.runner.pool_all(requests, timeout), timeout)
        return [classification_of(sequence, scorer) for sequence in sequences]

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

    def _cut(self, tokens: int | None) -> int | None:
        """The number of tokens to cut prompts to. Raises ``RequestError``."""
        limit = self._running().runner.engine.resolved.max_model_len
        if tokens is not None and tokens != -1 and not 1 <= tokens <= limit:
            raise RequestError(
                f"truncate_prompt_tokens is {tokens}; it must be -1 (as many as fit) or from 1 to "
                f"{limit}",
                param="truncate_prompt_tokens",
            )
        return limit if tokens == -1 else tokens

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
