"""Clients of a server with OpenAI's API."""
