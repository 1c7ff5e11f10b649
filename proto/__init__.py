"""The control plane's messages and services, generated from ``tandem.proto`` by ``generate.py``."""
