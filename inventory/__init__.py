"""Inventory of this machine: models, devices, kernels."""
