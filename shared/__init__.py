"""What both kinds of node are made of."""
