"""Tools of MCP servers: the servers, and the tool calls that the router runs."""
