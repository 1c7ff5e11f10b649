"""The Python API: the engine in the caller's own process, without a server."""
