"""Tokenize and detokenize, as in vLLM's API."""
