"""Access to a router: host names, keys and their limits, and scripts of other origins."""
