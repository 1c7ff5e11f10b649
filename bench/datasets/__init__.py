"""The requests that a benchmark sends: random prompts, files of prompts, traces."""
