"""KV from GPU to GPU on one host, by CUDA IPC."""

NAME = "cuda_ipc"
NO_GPU = "the KV cache is not on a CUDA device; use --device cuda, or --carrier auto"
