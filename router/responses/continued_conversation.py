"""The conversation that a request continues: earlier responses, and the items of its input."""

from __future__ import annotations

from typing import Any

from ..errors import ApiError, invalid
from ..mcp.approval_items import new_responses
from ..mcp.approvals import Approvals
from ..mcp.request_approvals import RequestApprovals
from .input_items import REFERENCE, Item, read_input
from .request import ContinuedConversation
from .store import ResponseStore, StoredResponse

PREVIOUS = "previous_response_id"
# Items, far more than fit into a prompt: those of some kinds are in none.
MAX_CONVERSATION = 65_536
PARTIAL = ("in_progress", "incomplete")


class Conversations:
    """Reads the conversations of one owner."""

    def __init__(self, store: ResponseStore, approvals: Approvals, owner: str) -> None:
        self.store = store
        self.owner = owner
        self._approvals = approvals

    def approvals_of(self, conversation: ContinuedConversation) -> RequestApprovals:
        """The approvals of calls that a conversation ends with. Raises ``RequestError``."""
        responses = new_responses(conversation.items, conversation.whole)
        return RequestApprovals(self._approvals, self.owner, responses)

    def read(self, given: Any, previous: str | None, ignored: set[str]) -> ContinuedConversation:
        """Read the input, if there is any, after the response with the id ``previous``. Raises
        ``RequestError`` or ``ApiError``."""
        items = [] if given is None else self._resolved(read_input(given, ignored))
        earlier = list[Item]()
        if previous is not None:
            stored = self.store.get_in_thread(previous, self.owner, PREVIOUS)
            _check_ended(stored)
            earlier = stored.conversation
        _check_items(len(earlier) + len(items))
        return ContinuedConversation(
            earlier=earlier,
            items=items,
            is_partial=_ends_in_partial_message(given),
        )

    def _resolved(self, items: list[Item]) -> list[Item]:
        """The items, with those of stored responses instead of references to them."""
        named = {item["id"] for item in items if item["type"] == REFERENCE}
        if not named:
            return items
        found = self.store.items_in_thread(named, self.owner)
        for i, item in enumerate(items):
            if item["type"] == REFERENCE and item["id"] not in found:
                message = (
                    f"Invalid 'input[{i}]': no stored response has an item with the id "
                    f"'{item['id'][:64]}'. Responses with 'store' set to false, that were deleted "
                    "or are too old are not kept; send the item itself."
                )
                raise ApiError(404, message, param="input", code="item_not_found")
        return [found[item["id"]] if item["type"] == REFERENCE else item for item in items]


def _check_ended(response: StoredResponse) -> None:
    if response.in_progress:
        message = f"The response '{response.body['id']}' is still in progress; wait for its end."
        raise ApiError(400, message, param=PREVIOUS, code="response_in_progress")


def _check_items(count: int) -> None:
    if count > MAX_CONVERSATION:
        raise invalid(
            f"The conversation has {count} items; the limit is {MAX_CONVERSATION}. Begin a new "
            "one.",
            PREVIOUS,
            "array_above_max_length",
        )


def _ends_in_partial_message(given: Any) -> bool:
    """True if the last item is an unfinished message of the model, which vLLM continues."""
    last = given[-1] if isinstance(given, list) and given else None
    if not isinstance(last, dict) or last.get("role") != "assistant":
        return False
    return last.get("status") in PARTIAL
