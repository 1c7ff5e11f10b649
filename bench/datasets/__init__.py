"""Requests of benchmarks: random prompts, files of prompts, traces."""
