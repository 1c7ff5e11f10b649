"""One decoder, built from a declarative spec; one short file for each family of checkpoints."""
