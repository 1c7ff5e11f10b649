"""The decode node: requests in, tokens out. It drives every transfer."""
