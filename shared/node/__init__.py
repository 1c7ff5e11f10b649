"""What the head processes of both kinds of node share: start-up, registration, probes, metrics."""
