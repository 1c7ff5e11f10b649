"""The KV cache: planning, block pool, prefix index, cache tensors and the wire layout."""
