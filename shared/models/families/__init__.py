"""One file a family: how its ``config.json`` and weight names read."""
