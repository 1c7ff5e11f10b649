"""Embeddings, scores and labels of texts."""
