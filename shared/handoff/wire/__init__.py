"""The meaning of the bytes between two ranks: frames, greetings, which heads, which layers."""
