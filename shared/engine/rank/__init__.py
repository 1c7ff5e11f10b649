"""One rank's process: its part of the model, the runner and the sampler."""
