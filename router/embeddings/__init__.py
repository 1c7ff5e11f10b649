"""Vectors of texts, as in OpenAI's API."""
