"""The handoff of KV between nodes: wire format, carriers, data plane, transfers and leases."""
