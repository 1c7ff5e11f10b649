"""What the router shows to monitors."""
