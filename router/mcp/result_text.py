"""The result of a tool call as text for the model, of bounded size."""

from __future__ import annotations

from typing import Any

from ..requests.json_size import json_text


def result_text(content: list[Any], structured: Any, max_bytes: int) -> str:
    """The text of a result's content blocks, which are dicts; of its structured value if it has no
    blocks."""
    text = "\n".join(_block(block) for block in content)
    if not content and structured is not None:
        text = json_text(structured)
    return cut(text, max_bytes)


def cut(text: str, max_bytes: int) -> str:
    """The text in at most ``max_bytes`` bytes, with a note if it was truncated."""
    data = text.encode(errors="replace")
    if len(data) <= max_bytes:
        return data.decode()
    note = f"\n[cut: the result has {len(data)} bytes]"
    return data[: max(0, max_bytes - len(note))].decode(errors="ignore") + note


def _block(block: dict[str, Any]) -> str:
    kind = block.get("type")
    if kind == "text":
        return str(block.get("text", ""))
    if kind == "resource" and isinstance(text := block.get("resource", {}).get("text"), str):
        return text
    if kind == "resource_link":
        return f"[resource {block.get('uri')}]"
    return f"[{kind} left out: the model takes text only]"
