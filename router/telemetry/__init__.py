"""The router's metrics."""
