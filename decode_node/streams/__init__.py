"""The stream of a router: its calls, and their events on the way to it."""
