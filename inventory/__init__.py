"""What is on this machine: models, and what they could run on."""
