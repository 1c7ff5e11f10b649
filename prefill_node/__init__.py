"""The prefill node: tokens in, KV out."""
