"""Parts of any long-running process: its lifeline, signals, threads, probes, backoff."""
