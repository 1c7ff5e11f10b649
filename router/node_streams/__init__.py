"""Calls of decode nodes, all on one stream to each."""
