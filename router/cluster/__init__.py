"""The nodes of a cluster: joins and heartbeats, their load, and the connections to them."""
