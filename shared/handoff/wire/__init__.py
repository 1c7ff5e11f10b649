"""What the bytes between two ranks mean: frames, greetings, which heads and which layers."""
