"""Conversations in which a summary stands for what the model wrote."""
