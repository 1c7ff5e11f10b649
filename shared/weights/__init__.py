"""Weights from files to the model: safetensors folders, and seeded random ones."""
