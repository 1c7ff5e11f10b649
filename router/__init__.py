"""The router: HTTP surfaces, text, placement and the registry. Never imports torch."""
