"""What the surfaces share to check a request: bodies, limits of the context, sizes of responses."""
