"""Limits on which several processes agree."""

# Nodes of the other kind that a node deals with, unless --max-peers says otherwise.
MAX_PEERS = 1024
# A rank takes six sockets and eight descriptors for each rank of its peers, of the 2^14 and 2^16
# that it may have.
MAX_PEERS_LIMIT = 2048
# To a server, unless --max-connections says otherwise: to a router by HTTP, or to the control plane
# of a node, where each peer and each router has one or two.
MAX_CONNECTIONS = 4096
# Prefill nodes that a decode node examines in one call of ``tandem doctor``.
MAX_EXAMINED = 64
# The priority of work that waits behind all other work, whatever the scheduling policy: batches.
BACKGROUND_PRIORITY = 2**31 - 1
