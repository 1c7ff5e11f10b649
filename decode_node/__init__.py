"""Requests in, tokens out: continuous batching, and the driving side of every transfer."""
