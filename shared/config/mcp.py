"""Options of a router about MCP servers."""

from __future__ import annotations

from dataclasses import dataclass

from .fields import option


@dataclass(frozen=True, kw_only=True)
class McpConfig:
    """Options about MCP servers, of which there are none by default."""

    mcp_command: str | None = option(
        None,
        "--mcp-command",
        "Program of an MCP server with the label mcp; the router starts and ends it.",
    )
    mcp_args: str | None = option(
        None, "--mcp-args", "Arguments of --mcp-command, separated by commas."
    )
    mcp_config: str | None = option(
        None,
        "--mcp-config",
        "JSON file of MCP servers by label: {'mcpServers': {LABEL: {'command': ..., 'args': [...], "
        "'env': {...}}}}, or {'url': ..., 'headers': {...}} for a remote one. ${NAME} is replaced "
        "by an environment variable.",
    )
    mcp_offer_tools: bool = option(
        False,
        "--mcp-offer-tools",
        "Offer the tools of all MCP servers in chats without tools; the client runs the calls.",
    )
    mcp_max_rounds: int = option(
        8,
        "--mcp-max-rounds",
        "Maximum rounds of tool calls in one request; then the model must answer without tools.",
        minimum=1,
        maximum=64,
    )
    mcp_timeout: float = option(
        60.0,
        "--mcp-timeout",
        "Maximum seconds of a tool call, of connecting to an MCP server, and of listing its tools.",
        minimum=0.1,
        maximum=3600.0,
    )
    mcp_max_result_bytes: int = option(
        64 << 10,
        "--mcp-max-result-bytes",
        "Maximum size of a tool call's result in bytes; a longer one is cut off.",
        minimum=1024,
        maximum=1 << 20,
    )
