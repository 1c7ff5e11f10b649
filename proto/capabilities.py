"""Capabilities: names of what a node supports, which it announces when it joins a router.

protobuf drops unknown fields without an error, so an older node would serve a request with a new
field as if it lacked it. A router that is newer than its nodes can tell by these names which of
them may have such a request. A new field of ``GenerateRequest`` or its parts that changes results
comes with a new name.
"""

from __future__ import annotations

CAPABILITIES = frozenset(
    {
        "allowed_token_ids",
        "structured_outputs",
        "embeddings",
        "bad_words",
        "logprob_token_ids",
        "thinking_budget",
        "tool_calls",
        "resume",
        "thinking_ends_in_calls",
        "scores",
        "stream",
    }
)
