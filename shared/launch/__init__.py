"""Starting a whole cluster on one machine, and keeping it alive."""
