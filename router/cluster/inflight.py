"""The load that a router has placed on a node and the node has not reported yet.

A heartbeat is up to a second old, so placement by heartbeats alone would send a burst to one node.
The router therefore counts its own prompts from their placement until the node reports them as
computed; a report adds what other routers have queued. The keys of a prompt are expected on its
node until the node has had time to report them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

# Reports to wait for: the first after a prompt was computed may have been written before.
REPORTS = 2


@dataclass(slots=True, eq=False)
class InflightPrompt:
    """One prompt on one node: the tokens to compute there, the room it takes, and the keys that the
    node will report. ``reports`` counts down once it is computed."""

    compute_tokens: int
    room_tokens: int
    keys: tuple[int, ...]
    reports: int = REPORTS


class InflightLoad:
    """This router's prompts on one node. Each begins once and ends once."""

    def __init__(self) -> None:
        self.queued_tokens = 0  # to be computed on the node, including other routers'
        self.compute_tokens = 0  # this router's part of them
        # Tokens that fit into the node's free blocks, less those placed since its last report; None
        # if it has reported no blocks.
        self.room_tokens: int | None = None
        self._settling: list[InflightPrompt] = []
        self._expected: Counter[int] = Counter()

    def expects(self, key: int) -> bool:
        """True if the node is expected to hold this key."""
        return key in self._expected

    def begin(self, prompt: InflightPrompt) -> None:
        self.compute_tokens += prompt.compute_tokens
        self.queued_tokens += prompt.compute_tokens
        if self.room_tokens is not None:
            self.room_tokens -= prompt.room_tokens
        self._expected.update(prompt.keys)

    def end(self, prompt: InflightPrompt, *, computed: bool) -> None:
        """Stop counting the prompt: it is ``computed``, or never will be."""
        self.compute_tokens -= prompt.compute_tokens
        self.queued_tokens -= prompt.compute_tokens
        if computed:
            self._settling.append(prompt)
        else:
            self._forget(prompt)

    def apply_report(self, queued_tokens: int, room_tokens: int | None) -> None:
        """Apply the node's own counts, which include other routers' prompts."""
        self.queued_tokens = max(queued_tokens, self.compute_tokens)
        self.room_tokens = room_tokens
        for prompt in self._settling:
            prompt.reports -= 1
            if not prompt.reports:
                self._forget(prompt)
        self._settling = [prompt for prompt in self._settling if prompt.reports]

    def _forget(self, prompt: InflightPrompt) -> None:
        self._expected.subtract(prompt.keys)
        for key in prompt.keys:
            if self._expected[key] <= 0:
                del self._expected[key]


class InflightPlacement:
    """The in-flight entries of one prompt on all nodes on which it was placed."""

    def __init__(self) -> None:
        self._entries: list[tuple[str, InflightLoad, InflightPrompt]] = []

    def begin(self, node_id: str, load: InflightLoad, prompt: InflightPrompt) -> None:
        load.begin(prompt)
        self._entries.append((node_id, load, prompt))

    def end(self, *computed_on: str) -> None:
        """End the prompt on all nodes; those in ``computed_on`` hold it now. No-op when
        repeated."""
        entries, self._entries = self._entries, []
        for node_id, load, prompt in entries:
            load.end(prompt, computed=node_id in computed_on)
