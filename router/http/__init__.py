"""HTTP itself, without any API: bounded reading, watched writing, JSON, keys and hosts."""
