"""The conversation of a request: earlier responses, and the items of its input."""

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
# Items; more than fit into a prompt, because some kinds are not part of it.
MAX_CONVERSATION = 65_536
PARTIAL = ("in_progress", "incomplete")


class Conversations:
    """Reads the conversations of one owner."""

    def __init__(self, store: ResponseStore, approvals: Approvals, owner: str) -> None:
        self.store = store
        self.owner = owner
        self._approvals = approvals

    def approvals_of(self, conversation: ContinuedConversation) -> RequestApprovals:
        """The approvals of tool calls in the input. Raises ``RequestError``."""
        approvals = new_responses(conversation.items, conversation.all_items)
        return RequestApprovals(self._approvals, self.owner, approvals)

    def read(self, value: Any, previous: str | None, ignored: set[str]) -> ContinuedConversation:
        """Read the input, which may be ``None``, after the response with the id ``previous``.
        Raises ``RequestError`` or ``ApiError``."""
        items = [] if value is None else self._resolve(read_input(value, ignored))
        earlier = list[Item]()
        if previous is not None:
            stored = self.store.get_in_thread(previous, self.owner, PREVIOUS)
            _check_not_in_progress(stored)
            earlier = stored.conversation
        _check_items(len(earlier) + len(items))
        return ContinuedConversation(
            earlier=earlier,
            items=items,
            is_partial=_ends_in_partial_message(value),
        )

    def _resolve(self, items: list[Item]) -> list[Item]:
        """The items, with references replaced by items of stored responses."""
        ids = {item["id"] for item in items if item["type"] == REFERENCE}
        if not ids:
            return items
        stored = self.store.items_in_thread(ids, self.owner)
        for i, item in enumerate(items):
            if item["type"] == REFERENCE and item["id"] not in stored:
                message = (
                    f"Invalid 'input[{i}]': no stored response has an item with the id "
                    f"'{item['id'][:64]}'. The response may have 'store' set to false, or was "
                    "deleted, or has expired; send the item itself."
                )
                raise ApiError(404, message, param="input", code="item_not_found")
        return [stored[item["id"]] if item["type"] == REFERENCE else item for item in items]


def _check_not_in_progress(response: StoredResponse) -> None:
    if response.in_progress:
        message = f"The response '{response.body['id']}' is still in progress; wait for its end."
        raise ApiError(400, message, param=PREVIOUS, code="response_in_progress")


def _check_items(count: int) -> None:
    if count > MAX_CONVERSATION:
        raise invalid(
            f"The conversation has {count} items; the limit is {MAX_CONVERSATION}. Start a new "
            "one.",
            PREVIOUS,
            "array_above_max_length",
        )


def _ends_in_partial_message(value: Any) -> bool:
    """True if the last item is an incomplete message of the model, to be continued as in vLLM."""
    last = value[-1] if isinstance(value, list) and value else None
    if not isinstance(last, dict) or last.get("role") != "assistant":
        return False
    return last.get("status") in PARTIAL
