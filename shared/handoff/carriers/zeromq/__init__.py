"""Connections between two ranks over ZeroMQ: greetings, control frames, bulk sockets."""
