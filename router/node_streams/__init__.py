"""Requests to decode nodes, multiplexed on one stream to each node."""
