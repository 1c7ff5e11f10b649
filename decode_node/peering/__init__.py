"""Prefill nodes that a decode node knows: greetings, canaries, leases, backoff, measured links."""
