"""HTTP itself, without any API: bounded reading, watched writing, JSON, deadlines."""
