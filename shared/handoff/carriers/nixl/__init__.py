"""KV over RDMA, by NIXL."""

NAME = "nixl"
