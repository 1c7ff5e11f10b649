"""The measuring HTTP client."""
