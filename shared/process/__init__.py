"""Parts of any long-running process: lifeline, signals, threads, probes, backoff."""
