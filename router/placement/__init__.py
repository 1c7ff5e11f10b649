"""Which nodes get a request: pure functions and the table of prefixes that they ask."""
