"""The KV cache: block pool, prefix index, cache tensors and the wire layout."""
