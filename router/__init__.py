"""HTTP in, tokens out: protocol surfaces, text, and which node gets what. Never imports torch."""
