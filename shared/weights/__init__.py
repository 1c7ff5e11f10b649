"""Weight files: finding, downloading and reading checkpoints."""
