"""Tools of MCP servers: the servers, and the calls that the router runs."""
