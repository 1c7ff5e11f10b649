"""Parts of parsing a request that APIs share: bodies, the context's length, response sizes."""
