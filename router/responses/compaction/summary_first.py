"""A request whose first generation is a summary of its conversation."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from ...generation import (
    ChoiceDelta,
    GenerationRequest,
    Outputs,
    Parsing,
    RequestAdmitted,
    ServerTool,
    ToolRounds,
)
from ...requests.context import ContextError
from ..continued_conversation import ContinuedConversation
from ..input_items import compaction_item, encoded
from .summary import checked_summary
from .written_summary import WrittenSummary

Parse = Callable[[ContinuedConversation], GenerationRequest]


@dataclass(frozen=True, kw_only=True)
class SummaryFirst:
    """The rounds of one request: ``summary``, and those of the answer that ``follow`` parses, with
    the summary in its prompt. ``answers`` has the tools of the answer's rounds, if it has any."""

    summary: GenerationRequest
    answers: ToolRounds | None
    follow: Callable[[str], GenerationRequest]

    @property
    def tools(self) -> Mapping[str, ServerTool]:
        return {} if self.answers is None else self.answers.tools

    @property
    def approved(self) -> Collection[str]:
        return ()

    @property
    def listings(self) -> Sequence[Mapping[str, Any]]:
        """None before the summary; those of the answer come when it begins."""
        return ()

    async def outputs(
        self,
        request: GenerationRequest,
        generate: Callable[[GenerationRequest], Outputs],
        parse: Parsing,
    ) -> Outputs:
        """The outputs of both generations as those of one: admitted once, finished once."""
        written = WrittenSummary()
        same: dict[str, Any] = {"priority": request.priority}
        name = f"{request.request_id}.summary"
        summary = replace(self.summary, request_id=name, stream=False, **same)
        async with aclosing(generate(summary)) as outputs:
            async for arrived in outputs:
                if written.take(arrived):
                    yield [RequestAdmitted()]
        text = checked_summary(written.text)
        yield [ChoiceDelta(0, tokens=written.tokens, compacted=text)]
        same |= {"request_id": request.request_id, "stream": request.stream}
        answer = replace(await parse(lambda: self.follow(text)), **same)
        yield [ChoiceDelta(0, began=answer)]
        rounds = answer.rounds
        answers = generate(answer) if rounds is None else rounds.outputs(answer, generate, parse)
        async with aclosing(answers) as outputs:
            async for arrived in outputs:
                if taken := [one for one in arrived if not isinstance(one, RequestAdmitted)]:
                    yield taken


def parse_within(
    threshold: int,
    conversation: ContinuedConversation,
    parse: Parse,
    summarize: Callable[[], GenerationRequest],
) -> GenerationRequest:
    """The request that answers a conversation. It begins with a summary if that has more tokens
    than ``threshold``, and if there is room for the summary in the context. Raises ``RequestError``
    as ``parse`` does."""
    whole: GenerationRequest | None = None
    try:
        whole = parse(conversation)
        if whole.prompt_tokens <= threshold:
            return whole
        return _summarized(whole, conversation, parse, summarize())
    except ContextError as error:
        if whole is not None:
            return whole
        if error.length <= threshold:
            raise
    summary = summarize()
    return _summarized(parse(_compacted(conversation, "")), conversation, parse, summary)


def _summarized(
    answer: GenerationRequest,
    conversation: ContinuedConversation,
    parse: Parse,
    summary: GenerationRequest,
) -> GenerationRequest:
    """The request of a summary, and after it of an answer such as ``answer``."""
    rounds = SummaryFirst(
        summary=summary,
        answers=answer.rounds,
        follow=lambda text: parse(_compacted(conversation, text)),
    )
    most = [summary.max_tokens[0] + answer.max_tokens[0]]
    return replace(
        answer,
        prompts=summary.prompts,
        prompt_text=summary.prompt_text,
        max_tokens=most,
        rounds=rounds,
    )


def _compacted(conversation: ContinuedConversation, text: str) -> ContinuedConversation:
    return conversation.with_summary(compaction_item("", encoded(text)))
