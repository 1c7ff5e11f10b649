"""Checkpoints on disk, and how they reach a rank's parameters."""
