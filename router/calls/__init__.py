"""Calls of decode nodes: one stream to each, or an RPC for each call of an older node."""
