"""Scheduling: which sequences a step computes, and where their KV lies. No torch, no clock."""
