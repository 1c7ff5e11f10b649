"""Faults of a handoff, of which all cases share a cluster."""
