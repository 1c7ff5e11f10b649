"""KV over the connection's own bulk socket, between any two hosts."""

NAME = "tcp"
