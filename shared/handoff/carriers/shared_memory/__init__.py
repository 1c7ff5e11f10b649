"""KV through memory of the host that both processes map."""

NAME = "shared_memory"
