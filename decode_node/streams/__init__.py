"""The stream of a router: its requests, and their events on the way to it."""
