"""What any long-running process needs: its lifeline, signals, threads, probes, backoff."""
