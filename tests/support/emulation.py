"""Whether tests for a GPU run on one that is emulated."""

from __future__ import annotations

import os

# Set by ``on_gpu --device emulation``: tests that need a GPU run on a CPU, a few of each kind.
ENVIRONMENT = "TESTS_EMULATE_GPU"
EMULATED = ENVIRONMENT in os.environ
