"""One decoder, and one short spec per model family."""
