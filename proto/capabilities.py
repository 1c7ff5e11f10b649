"""Capabilities: the features that a node announces when it joins a router.

protobuf ignores unknown fields without an error, so an older node would serve a request as if it
had no such field. By these names a newer router can tell which nodes support a request. Each new
field of ``GenerateRequest`` or its parts that changes results gets a new name.
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
