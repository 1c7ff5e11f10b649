"""Credentials of a cluster: TLS, tokens, and the addresses that may be dialled."""
