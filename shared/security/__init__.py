"""Credentials of a cluster: TLS, tokens, and which addresses may be dialled."""
