"""The nodes of a cluster, as this router knows them."""
