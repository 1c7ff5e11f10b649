"""Layers of a decoder: attention, feed-forwards, norms, rope, and linears split over ranks."""
