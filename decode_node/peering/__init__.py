"""Known prefill nodes: greetings, canaries, leases, backoff, measured links."""
