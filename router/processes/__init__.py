"""Several worker processes that serve one port, and the keeper that they follow."""
