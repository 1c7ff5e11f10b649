"""The protocol between two ranks: frames, greetings, and the split of heads and layers."""
