"""GGUF: a model in one file, as llama.cpp's tools write it."""
