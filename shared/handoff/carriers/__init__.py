"""Carriers, which move frames from one rank to another: a folder for each kind, and the connections
that they share."""
