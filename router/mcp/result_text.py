"""The result of a call as text for a model, of bounded size."""

from __future__ import annotations

from typing import Any

from ..requests.json_size import json_text


def result_text(content: list[Any], structured: Any, most: int) -> str:
    """The text of the content blocks of a result, as dicts; of a result without blocks, its
    structured value."""
    text = "\n".join(_block(block) for block in content)
    if not content and structured is not None:
        text = json_text(structured)
    return cut(text, most)


def cut(text: str, most: int) -> str:
    """At most so many bytes, with a note of what is missing."""
    data = text.encode(errors="replace")
    if len(data) <= most:
        return data.decode()
    note = f"\n[cut: the result has {len(data)} bytes]"
    return data[: max(0, most - len(note))].decode(errors="ignore") + note


def _block(block: dict[str, Any]) -> str:
    kind = block.get("type")
    if kind == "text":
        return str(block.get("text", ""))
    if kind == "resource" and isinstance(text := block.get("resource", {}).get("text"), str):
        return text
    if kind == "resource_link":
        return f"[resource {block.get('uri')}]"
    return f"[{kind} left out: the model takes text only]"
