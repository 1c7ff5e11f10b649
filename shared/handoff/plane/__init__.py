"""The data plane of a rank: one thread that sends and receives KV."""
