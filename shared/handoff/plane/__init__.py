"""A rank's data plane: the loop that moves frames, and the state of its transfers."""
