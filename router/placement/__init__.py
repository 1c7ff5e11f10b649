"""Placement: pure functions that choose the nodes for a prompt, and the table of prefixes."""
