"""Access control: host names, API keys and their rate limits, CORS."""
