"""Ollama's API: requests parsed, responses formatted."""
