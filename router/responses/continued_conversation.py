"""The conversation that a request continues: earlier responses, and the items of its input."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ..errors import ApiError, invalid
from ..mcp.approval_items import new_answers
from ..mcp.approvals import Approvals
from ..mcp.request_approvals import RequestApprovals
from .background_runs import BackgroundRuns
from .input_items import REFERENCE, TRIGGER, UNSPOKEN, Item, read_input, size_of
from .response_store import ResponseStore

PREVIOUS = "previous_response_id"
# Items, far more than fit into a prompt: those of some kinds are in none.
MAX_CONVERSATION = 65_536
KEPT = ("user", "system", "developer")  # roles of messages, in a conversation that was compacted
PARTIAL = ("in_progress", "incomplete")


@dataclass(frozen=True, kw_only=True)
class ContinuedConversation:
    """``items`` is the input of the request itself; ``size`` is in bytes. ``is_partial`` if the
    response is the rest of its last message, ``compacts`` if it is a summary."""

    earlier: list[Item]
    items: list[Item]
    size: int
    is_partial: bool
    compacts: bool

    @cached_property
    def whole(self) -> list[Item]:
        """All items, except for those that a summary replaces. There may be many, which are looked
        at once, in a thread."""
        items = [*self.earlier, *self.items]
        places = [i for i, item in enumerate(items) if item["type"] == "compaction"]
        if not places:
            return items
        before, summary, after = items[: places[-1]], items[places[-1]], items[places[-1] + 1 :]
        if after and not _is_kept(after[0]):  # the answer to a question before the summary
            return _before_question(before, summary) + after
        return [*filter(_is_kept, before), summary, *after]

    @property
    def is_compactable(self) -> bool:
        """True if the model has written anything that no summary stands for, and the request wants
        it to answer."""
        if self.is_partial or self.compacts:
            return False
        written = [item["type"] for item in self.whole if not _is_kept(item)]
        return not all(kind in UNSPOKEN for kind in written)

    def with_summary(self, summary: Item) -> ContinuedConversation:
        """The conversation in which a summary stands for what the model has written; its last
        question comes after it."""
        return replace(self, earlier=_before_question(self.whole, summary), items=[])


def _is_kept(item: Item) -> bool:
    return item.get("role", "assistant") in KEPT


def _before_question(items: list[Item], summary: Item) -> list[Item]:
    """A summary of ``items`` before the last messages of the user, so that the model answers these.
    Of the others, those that a summary does not replace are left."""
    users = [i for i, item in enumerate(items) if item.get("role") == "user"]
    end = users[-1] + 1 if users else 0
    start = end
    while start and items[start - 1].get("role") == "user":
        start -= 1
    return [*filter(_is_kept, items[:start]), summary, *filter(_is_kept, items[start:])]


class Conversations:
    """Reads the conversations of one owner."""

    def __init__(
        self, store: ResponseStore, runs: BackgroundRuns, approvals: Approvals, owner: str
    ) -> None:
        self.store = store
        self.runs = runs
        self.owner = owner
        self._approvals = approvals

    def approvals_of(self, conversation: ContinuedConversation) -> RequestApprovals:
        """The approvals of calls that a conversation ends with. Raises ``RequestError``."""
        answers = new_answers(conversation.items, conversation.whole)
        return RequestApprovals(self._approvals, self.owner, answers)

    def read(self, given: Any, previous: str | None, ignored: set[str]) -> ContinuedConversation:
        """Read the input, if there is any, after the response with the id ``previous``. Raises
        ``RequestError`` or ``ApiError``."""
        items = [] if given is None else self._resolved(read_input(given, ignored))
        compacts = bool(items) and items[-1]["type"] == TRIGGER
        if compacts:
            items.pop()
        earlier, size = [], sum(map(size_of, items))
        if previous is not None:
            self.runs.check_ended(previous, self.owner, PREVIOUS)
            stored = self.store.get(previous, self.owner, PREVIOUS)
            earlier, size = stored.conversation, size + stored.size
        _check_items(len(earlier) + len(items))
        return ContinuedConversation(
            earlier=earlier,
            items=items,
            size=size,
            is_partial=_ends_in_partial_message(given),
            compacts=compacts,
        )

    def _resolved(self, items: list[Item]) -> list[Item]:
        """The items, with those of stored responses instead of references to them."""
        named = {item["id"] for item in items if item["type"] == REFERENCE}
        if not named:
            return items
        found = self.store.items(named, self.owner)
        for i, item in enumerate(items):
            if item["type"] == REFERENCE and item["id"] not in found:
                message = (
                    f"Invalid 'input[{i}]': no stored response has an item with the id "
                    f"'{item['id'][:64]}'. Responses with 'store' set to false, that were deleted "
                    "or are too old are not kept; send the item itself."
                )
                raise ApiError(404, message, param="input", code="item_not_found")
        return [found[item["id"]] if item["type"] == REFERENCE else item for item in items]


def _check_items(count: int) -> None:
    if count > MAX_CONVERSATION:
        raise invalid(
            f"The conversation has {count} items; the limit is {MAX_CONVERSATION}. Begin a new one "
            f"with a summary: see POST /v1/responses/compact.",
            PREVIOUS,
            "array_above_max_length",
        )


def _ends_in_partial_message(given: Any) -> bool:
    """True if the last item is an unfinished message of the model, which vLLM continues."""
    last = given[-1] if isinstance(given, list) and given else None
    if not isinstance(last, dict) or last.get("role") != "assistant":
        return False
    return last.get("status") in PARTIAL
