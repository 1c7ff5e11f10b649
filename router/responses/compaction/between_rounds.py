"""The compaction of a response that grows: the router runs calls of its model, whose results fill
the context."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, replace

from ...generation import GenerationRequest, Outputs, Parsing
from ...mcp.rounds import Messages, RoundSummary
from ...requests.context import ContextError
from ..chat_turns import as_messages, told
from ..continued_conversation import ContinuedConversation
from ..input_items import compaction_item, encoded
from .written_summary import WrittenSummary


@dataclass(frozen=True, kw_only=True)
class CompactionBetweenRounds:
    """See ``RoundCompaction``. What the rounds add to ``conversation`` is the model's, so a summary
    replaces all of it. ``summarize`` makes the request of one."""

    threshold: int
    conversation: ContinuedConversation
    instructions: str | None
    summarize: Callable[[Messages], GenerationRequest]

    async def summary(
        self,
        messages: Messages,
        name: str,
        generate: Callable[[GenerationRequest], Outputs],
        parse: Parsing,
    ) -> RoundSummary | None:
        """See ``RoundCompaction.summary``."""
        try:
            asked = await parse(lambda: self.summarize(messages))
        except ContextError:
            return None
        written = WrittenSummary()
        async with aclosing(generate(replace(asked, request_id=name, stream=False))) as outputs:
            async for arrived in outputs:
                written.take(arrived)
        text = written.text.getvalue().strip()
        return RoundSummary(text, written.tokens) if text else None

    def compacted(self, summary: str) -> Messages:
        """See ``RoundCompaction.compacted``."""
        item = compaction_item("", encoded(summary))
        shorter = self.conversation.with_summary(item)
        return [*told(self.instructions), *as_messages(shorter.whole)]
