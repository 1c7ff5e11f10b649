"""The engine: scheduler, sequence state, model runner, sampler, tensor-parallel ranks."""
