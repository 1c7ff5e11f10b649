"""KV over RDMA, by NIXL."""
