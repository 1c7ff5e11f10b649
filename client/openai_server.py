"""Requests to a server with OpenAI's API."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any

import httpx

from ..shared.config.client import ConnectionConfig
from ..shared.errors import TandemError, UsageError
from ..shared.host_port import is_loopback
from .text import printable

CONNECT_SECONDS = 10.0
MAX_MESSAGE = 500
JSON = {"content-type": "application/json"}


class ServerError(TandemError):
    """A server cannot be reached, or rejects a request."""


class OpenAIServer:
    """Requests to one server. Threads may share it."""

    def __init__(
        self, config: ConnectionConfig, transport: httpx.BaseTransport | None = None
    ) -> None:
        self.url = _base(config.url)
        self._name = config.model_name
        headers = {"authorization": f"Bearer {config.key}"} if config.key else {}
        try:
            self._client = httpx.Client(
                base_url=self.url,
                headers=headers,
                timeout=httpx.Timeout(config.timeout, connect=CONNECT_SECONDS),
                limits=httpx.Limits(max_connections=None),
                trust_env=not is_loopback(self.url.host),
                transport=transport,
            )
        except ValueError as error:  # an invalid header
            raise UsageError(f"--api-key cannot be sent: {error}") from None

    def close(self) -> None:
        self._client.close()

    def models(self) -> list[str]:
        """The names of the server's models. Raises ``ServerError``."""
        try:
            response = self._client.get("models")
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None
        data = self._body(response).get("data")
        models = data if isinstance(data, list) else ()
        return [printable(str(model.get("id"))) for model in models if isinstance(model, dict)]

    @property
    def model(self) -> str:
        """The model of requests: the configured one, or the first that the server lists."""
        if self._name is None:
            names = self.models()
            if not names:
                raise ServerError(f"{self.url} has no model at the moment")
            self._name = names[0]
        return self._name

    @model.setter
    def model(self, name: str) -> None:
        self._name = name

    def post(self, path: str, body: bytes) -> httpx.Response:
        """The response to a JSON body, whatever its status. Raises ``httpx.HTTPError``."""
        return self._client.post(path, content=body, headers=JSON)

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The events of a streamed response. Closing the iterator ends the request. Raises
        ``ServerError``."""
        try:
            content = json.dumps({**body, "stream": True}).encode()
            with self._client.stream("POST", path, content=content, headers=JSON) as response:
                if response.status_code != HTTPStatus.OK:
                    response.read()
                    self._body(response)
                yield from self._events(response)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None

    def _events(self, response: httpx.Response) -> Iterator[dict[str, Any]]:
        for line in response.iter_lines():
            name, _, data = line.partition(":")
            if name != "data" or data.strip() == "[DONE]":
                continue
            try:
                event = json.loads(data)
            except ValueError:
                raise ServerError(f"{self.url} sent an event that is not JSON") from None
            if not isinstance(event, dict):
                raise ServerError(f"{self.url} sent an event that is not a JSON object")
            if event.get("error"):
                raise ServerError(f"the response was interrupted: {message_of(event)}")
            yield event

    def _body(self, response: httpx.Response) -> dict[str, Any]:
        """The JSON object of a response. Raises ``ServerError`` for an error."""
        try:
            body = response.json()
        except ValueError:
            body = None
        if response.status_code != HTTPStatus.OK:
            reason = message_of(body) or response.reason_phrase
            hint = " (--api-key)" if response.status_code == HTTPStatus.UNAUTHORIZED else ""
            raise ServerError(f"{response.url}: {response.status_code}: {reason}{hint}")
        if not isinstance(body, dict):
            raise ServerError(f"{response.url} is not OpenAI's API: the response is no JSON object")
        return body

    def _unreachable(self, error: httpx.HTTPError) -> ServerError:
        if isinstance(error, httpx.ConnectError):
            return ServerError(
                f"nothing answers at {self.url} ({error}); start a server (tandem serve), give "
                "the address of one (--url), or a model (tandem chat MODEL)"
            )
        return ServerError(f"{self.url}: {error or type(error).__name__}")


def message_of(body: Any) -> str:
    """The message in the error of OpenAI's or a similar API."""
    error = body.get("error", body) if isinstance(body, dict) else body
    message = error.get("message", error.get("detail")) if isinstance(error, dict) else error
    return printable(str(message or ""))[:MAX_MESSAGE]


def _base(url: str) -> httpx.URL:
    """The URL of the API, by default under /v1. Raises ``UsageError``."""
    try:
        parsed = httpx.URL(url if "://" in url else f"http://{url}")
    except httpx.InvalidURL as error:
        raise UsageError(f"--url {url!r}: {error}") from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise UsageError(f"--url {url!r} is not an address such as http://127.0.0.1:8000/v1")
    return parsed if parsed.path.strip("/") else parsed.copy_with(path="/v1")
