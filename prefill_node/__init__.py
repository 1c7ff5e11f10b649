"""Tokens in, KV out: the service that fills transfers."""
