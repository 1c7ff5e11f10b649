"""Limits that several processes share."""

# Default of --max-peers.
MAX_PEERS = 1024
# Maximum of --max-peers: a rank has at most 2^14 sockets and 2^16 descriptors, and needs six and
# eight for each rank of its peers.
MAX_PEERS_LIMIT = 2048
# Default of --max-connections, to a router by HTTP or to the control plane of a node, where each
# peer and each router has one or two.
MAX_CONNECTIONS = 4096
# Prefill nodes that a decode node examines for one run of ``tandem doctor``.
MAX_EXAMINED = 64
# Priority of batches, which wait behind all other work with any scheduling policy.
BACKGROUND_PRIORITY = 2**31 - 1
