"""HTTP without meaning: bounded reading, watched writing, connections, keys and hosts."""
