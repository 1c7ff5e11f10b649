"""The head process of either kind of node: start-up, registration, roles, metrics."""
