"""Connections between two ranks over ZeroMQ: greetings, control frames, and TCP's bulk frames."""
