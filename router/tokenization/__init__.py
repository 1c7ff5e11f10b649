"""Text to tokens and back, as in vLLM's API."""
