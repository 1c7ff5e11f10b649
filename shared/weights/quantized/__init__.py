"""Checkpoints in safetensors whose weights are quantised."""
