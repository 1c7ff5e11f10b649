"""Programs that talk to a server with OpenAI's API."""
