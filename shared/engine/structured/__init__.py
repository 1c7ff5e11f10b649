"""Structured outputs: grammars that outputs follow, and the masks of tokens that enforce them."""
