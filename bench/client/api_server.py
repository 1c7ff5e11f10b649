"""An OpenAI-compatible server: requests in its format, and what it says about itself."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...shared.errors import BenchmarkError, UsageError
from .connection import ExchangeFailed
from .measured_response import MeasuredResponse, StreamError
from .pool import HttpClient, Target

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]

SHORT_SECONDS = 60.0
# As in vLLM; longer responses are not measured.
REQUEST_SECONDS = 6 * 3600.0
READY_INTERVAL = 1.0
# Bytes of an error's body that are read, and characters of it in a message if it is not JSON.
MAX_ERROR_BYTES = 8192
MAX_ERROR_CHARACTERS = 500
CHAT = "openai-chat"
# vLLM's names of servers with OpenAI's completions.
COMPLETIONS = ("openai", "vllm", "sglang", "llama.cpp")
ENDPOINTS = {CHAT: "/v1/chat/completions"} | dict.fromkeys(COMPLETIONS, "/v1/completions")


@dataclass(slots=True)
class ApiServer:
    """A server under measurement. ``extra_body`` is added to each request, and overrides its
    fields."""

    client: HttpClient
    backend: str = "openai"
    endpoint: str = "/v1/completions"
    model: str | None = None
    ignore_eos: bool = False
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    request_seconds: float = REQUEST_SECONDS

    @property
    def is_chat(self) -> bool:
        return self.backend == CHAT

    def body(self, prompt: Prompt, max_tokens: int, **more: Any) -> bytes:
        """The body of a streamed request; ``more`` are additional fields."""
        fields: dict[str, Any] = {"model": self.model} if self.model else {}
        if self.is_chat:
            fields |= {"messages": as_messages(prompt), "max_completion_tokens": max_tokens}
        else:
            fields |= {"prompt": prompt, "max_tokens": max_tokens}
        fields |= {"stream": True, "stream_options": {"include_usage": True}}
        if self.ignore_eos:
            fields["ignore_eos"] = True
        return json.dumps({**fields, **self.extra_body, **more}, separators=(",", ":")).encode()

    async def ask(
        self, body: bytes, response: MeasuredResponse | None = None, request_id: str = ""
    ) -> MeasuredResponse:
        """Send a request and measure its response, which is updated as it arrives. Failures are
        recorded in it."""
        response = response or MeasuredResponse()
        headers = {"x-request-id": request_id} if request_id else {}
        request = self.client.request("POST", self.endpoint, body, headers)
        raw = bytearray()

        def on_body(data: bytes, now: float) -> None:
            # The beginning is kept for errors, which are short and have no events.
            if len(raw) < MAX_ERROR_BYTES:
                raw.extend(data[:MAX_ERROR_BYTES])
            response.feed(data, now)

        response.sent_at = time.perf_counter()
        try:
            async with asyncio.timeout(self.request_seconds):
                connection = await self.client.send(request, on_body)
        except (OSError, ExchangeFailed, StreamError) as error:  # a timeout is an OSError
            response.error = str(error) or f"no end within {self.request_seconds:g} s"
            return response
        response.finished = True
        if connection.status != 200:
            response.error = _refusal(connection.status, bytes(raw), connection.location)
        elif not response.arrivals:
            response.error = f"no event with output: {_excerpt(bytes(raw))}"
        return response

    async def first_model(self) -> str:
        """The name of the first model of the server. Raises ``BenchmarkError``."""
        content = await self._json("GET", "/v1/models")
        try:
            return str(content["data"][0]["id"])
        except (KeyError, IndexError, TypeError):
            raise BenchmarkError(
                f"{self.client.target.authority}/v1/models lists no model; give --model"
            ) from None

    async def tokenize(self, text: str) -> list[int] | None:
        """The tokens of a text by the server's tokenizer; ``None`` if it has no such endpoint.
        vLLM and Tandem read ``prompt``, llama.cpp reads ``content``."""
        body = {"prompt": text, "content": text, "add_special_tokens": False}
        content = await self._json("POST", "/tokenize", self._named(body), missing={})
        return _tokens(content)

    async def render(self, prompt: str) -> list[int]:
        """The tokens of a chat with one message. Raises ``BenchmarkError``."""
        body = {"messages": as_messages(prompt), "add_generation_prompt": True}
        tokens = _tokens(await self._json("POST", "/tokenize", self._named(body), missing={}))
        if tokens is None:
            raise BenchmarkError(
                "the server does not apply chat templates at /tokenize; give --tokenizer, "
                "--skip-chat-template or --backend openai-chat"
            )
        return tokens

    async def wait_ready(self, body: bytes, seconds: float) -> None:
        """Repeat a request until it succeeds. Raises ``BenchmarkError``."""
        deadline = time.monotonic() + seconds
        while True:
            response = await self.ask(body)
            if response.success:
                return
            if time.monotonic() + READY_INTERVAL > deadline:
                raise BenchmarkError(
                    f"{self.client.target.authority} is not ready within {seconds:g} s: "
                    f"{response.error}"
                )
            await asyncio.sleep(READY_INTERVAL)

    def _named(self, body: dict[str, Any]) -> dict[str, Any]:
        return body | ({"model": self.model} if self.model else {})

    async def _json(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, missing: Any = None
    ) -> Any:
        """The JSON of a response; for an error ``missing``, unless that is ``None``."""
        where = f"{self.client.target.authority}{self.client.target.path}{path}"
        try:
            status, content = await self.client.whole(method, path, body, seconds=SHORT_SECONDS)
            if status != 200:
                if missing is not None:
                    return missing
                raise BenchmarkError(f"{where}: {_refusal(status, content, '')}")
            return json.loads(content)
        except ValueError:
            raise BenchmarkError(f"{where} is not JSON") from None
        except (OSError, ExchangeFailed) as error:
            reason = str(error) or f"no response within {SHORT_SECONDS:g} s"
            raise BenchmarkError(f"cannot reach {where}: {reason}") from None


def as_messages(prompt: Prompt) -> Sequence[Mapping[str, Any]]:
    """The messages of a chat; a text is a single message."""
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    if prompt and all(isinstance(item, Mapping) for item in prompt):
        return prompt  # type: ignore[return-value]
    raise UsageError("a chat cannot be sent as token ids; use --backend openai")


def api_server(
    *,
    url: str,
    backend: str,
    endpoint: str | None,
    header: Sequence[str],
    insecure: bool,
    **more: Any,
) -> ApiServer:
    """The server at a URL. ``header`` has KEY=VALUE; the key of OPENAI_API_KEY is added if set."""
    headers = key_values("--header", header)
    key = os.environ.get("OPENAI_API_KEY")
    if key and "authorization" not in map(str.lower, headers):
        headers["authorization"] = f"Bearer {key}"
    path = endpoint or ENDPOINTS[backend]
    if not path.startswith("/") or not path.isprintable() or " " in path:
        raise UsageError(f"--endpoint {path!r} is not a path such as /v1/completions")
    client = HttpClient(Target.of_url(url, insecure=insecure), headers)
    client.request("GET", "/", b"", {})  # checks the headers
    return ApiServer(client, backend, path, **more)


def key_values(flag: str, items: Sequence[str]) -> dict[str, str]:
    """KEY=VALUE pairs. Raises ``UsageError``."""
    wrong = [item for item in items if not item.partition("=")[0].strip() or "=" not in item]
    if wrong:
        raise UsageError(f"{flag} {wrong[0]!r} is not KEY=VALUE")
    pairs = (item.partition("=") for item in items)
    return {key.strip(): value.strip() for key, _, value in pairs}


def _tokens(content: Any) -> list[int] | None:
    tokens = content.get("tokens") if isinstance(content, dict) else None
    valid = isinstance(tokens, list) and all(type(token) is int for token in tokens)
    return tokens if valid else None


def _refusal(status: int, body: bytes, location: str) -> str:
    """The status and message of an error, in one line."""
    if 300 <= status < 400:
        return f"HTTP {status}, a redirection to {location}; use that URL"
    try:
        error = json.loads(body)["error"]
        message = error["message"] if isinstance(error, dict) else str(error)
    except (ValueError, KeyError, TypeError):
        message = _excerpt(body)
    return f"HTTP {status}: {message}"


def _excerpt(body: bytes) -> str:
    return (
        " ".join(body[:MAX_ERROR_CHARACTERS].decode(errors="replace").split())
        or "an empty response"
    )
