"""Responses served by functions, with their store and the tools of MCP servers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

from tandem.router.database import Database
from tandem.router.http.memory_budget import MemoryBudget
from tandem.router.http.parsing import ParserPools
from tandem.router.mcp.approvals import Approvals
from tandem.router.mcp.chat import McpChat, McpChatCompletions
from tandem.router.responses.continued_conversation import Conversations
from tandem.router.responses.input_tokens import input_token_counter
from tandem.router.responses.store import ResponseStore, StoredResponse
from tandem.router.responses.surface import Responses
from tandem.router.state import SCHEMA
from tandem.shared.text.tokenizer import Tokenizer
from tandem.tests.router.in_process import InProcess


class InProcessResponses(InProcess):
    """A router that stores responses of one owner until the block ends. ``servers`` are those of
    MCP."""

    def __init__(
        self, tokenizer: Tokenizer | None = None, *, servers: Any = None, **settings: Any
    ) -> None:
        super().__init__(tokenizer, **settings)
        self._database = database = Database(SCHEMA)
        self._parsers = parsers = ParserPools(patience=10.0)
        options = self.options
        prompts = MemoryBudget(options.max_held_prompt_tokens, "prompt tokens")
        chat = McpChat(servers, parsers, prompts)
        self.store = ResponseStore(
            database, options.max_stored_responses, options.response_lifetime
        )
        conversations = Conversations(
            self.store, Approvals(database, options.response_lifetime), owner=""
        )
        self.surfaces[Responses.path] = Responses(chat, conversations)
        if servers is not None:
            self.surfaces[McpChatCompletions.path] = McpChatCompletions(chat, owner="")
        count = input_token_counter(chat, conversations, options)
        self.works[f"{Responses.path}/input_tokens"] = count

    def __enter__(self) -> Self:
        asyncio.run(self._database.open_in_memory())
        return self

    def __exit__(self, *error: object) -> None:
        self._parsers.close()
        asyncio.run(self._database.close())

    def create(self, **body: Any) -> Any:
        """The response object of a request that succeeds."""
        response = self.post(Responses.path, **body)
        assert response.status_code == 200, response.text
        return response.json()

    def stored(self, response_id: str) -> StoredResponse:
        """A response that was stored. Raises ``ApiError``."""
        return asyncio.run(self.store.get(response_id, ""))


@contextmanager
def openai_client(
    tokenizer: Tokenizer | None = None, **settings: Any
) -> Iterator[tuple[InProcessResponses, Any]]:
    """A router, and OpenAI's client of it."""
    with InProcessResponses(tokenizer, **settings) as c:
        yield c, c.openai()
