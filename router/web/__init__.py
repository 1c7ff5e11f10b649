"""The web page of the router."""
