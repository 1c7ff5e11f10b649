"""The parts that nodes, the router and the Python API have in common, in the order of the contracts
in pyproject.toml."""
