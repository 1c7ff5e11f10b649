"""A small MCP server on standard input and output; its argument selects its fault."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
EMPTY = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS: list[dict[str, Any]] = [
    {"name": "add", "description": "Add.", "inputSchema": SCHEMA,
     "outputSchema": {"type": "object"}, "annotations": {"readOnlyHint": True}},
    {"name": "environment", "inputSchema": {"type": "object"}},
    {"name": "fail", "inputSchema": {"type": "object"}},
    {"name": "hang", "inputSchema": {"type": "object"}},
    {"name": "large", "inputSchema": {"type": "object"}},
    {"name": "huge", "inputSchema": {"type": "object"}},
    {"name": "values", "inputSchema": EMPTY},
    {"name": "blocks", "inputSchema": EMPTY},
    {"name": "exit", "inputSchema": {"type": "object"}},
]  # fmt: skip


# Servers with many tools, and with some large ones, by their argument.
MANY: dict[str, Any] = {"many": lambda i: {"name": f"tool{i}"}}
LONG: dict[str, Any] = {
    "descriptions": lambda i: {"description": "x" * 100_000},
    "names": lambda i: {"name": f"{i}" + "x" * 100_000},
    "schemas": lambda i: {"inputSchema": {"type": "object", "title": "x" * 100_000}},
}


def text(value: Any, *, error: bool = False) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": str(value)}], "isError": error}


def call_result(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    match name:
        case "add":
            return text(arguments["a"] + arguments["b"])
        case "environment":
            return text(sorted(os.environ))
        case "fail":
            return text("it failed", error=True)
        case "hang":
            time.sleep(3600)
        case "large":
            return text("x" * 100_000)
        case "huge":
            return text("x" * 3_000_000)
        case "values":
            return {"content": [], "structuredContent": {"rows": [[1], {}] * 8000}}
        case "blocks":
            return {"content": [{"type": "text", "text": "x"}] + [{}] * 20_000}
        case "exit":
            os._exit(1)
    raise AssertionError(name)


def reply_to(method: str, params: dict[str, Any], fault: str) -> dict[str, Any] | None:
    if method == "initialize":
        return {
            "protocolVersion": params["protocolVersion"],
            "capabilities": {"tools": {"listChanged": True}},
            "serverInfo": {"name": "test", "version": "1"},
        }
    if method == "tools/list":
        if fault == "endless":
            number = int(params.get("cursor") or 0)
            tool = TOOLS[0] | {"name": f"tool{number}"}
            return {"tools": [tool] * 100, "nextCursor": str(number + 1)}
        if fault in MANY:
            number = int(params.get("cursor") or 0)
            tools = [TOOLS[0] | MANY[fault](100 * number + i) for i in range(100)]
            return {"tools": tools, "nextCursor": str(number + 1)}
        if fault in LONG:
            return {"tools": [TOOLS[0] | {"name": f"tool{i}"} | LONG[fault](i) for i in range(9)]}
        return {"tools": TOOLS}
    if method == "tools/call":
        return call_result(params["name"], params.get("arguments") or {})
    return {} if method == "ping" else None


def main() -> None:
    fault = sys.argv[1] if len(sys.argv) > 1 else ""
    if fault == "silent":
        time.sleep(3600)
    for line in sys.stdin:
        message = json.loads(line)
        if "id" not in message:
            continue
        if fault == "garbage":
            print("{not json", flush=True)
            continue
        result = reply_to(message["method"], message.get("params") or {}, fault)
        reply: dict[str, Any] = {"jsonrpc": "2.0", "id": message["id"]}
        reply |= {"result": result} if result is not None else {
            "error": {"code": -32601, "message": "no such method"}
        }  # fmt: skip
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
