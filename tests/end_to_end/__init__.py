"""Tests with real processes. A package, so that fixtures of its scope end with its last test."""
