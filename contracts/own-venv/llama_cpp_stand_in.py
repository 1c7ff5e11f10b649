# mypy: ignore-errors
"""llama.cpp's server tests against a running server: instead of starting one, tests use TARGET_URL.
Tests of llama.cpp's own routes and start options are skipped, and the model's text is not compared,
because the tests expect another model."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from unittest.mock import MagicMock
from urllib.parse import urlsplit

import pytest

URL = urlsplit(os.environ["TARGET_URL"])
# Paths that llama.cpp also serves without a version.
VERSIONED = ("/chat/completions", "/completions", "/embeddings", "/models", "/responses")
OWN_PATHS = (
    *("/completion", "/apply-template", "/props", "/slots", "/embedding"),
    *("/chat/completions/input_tokens",),
)
# Start options that are not available here.
OWN_OPTIONS = (
    *("chat_template", "chat_template_file", "model_tags", "no_ui", "api_key", "gcp_compat"),
    *("backend_sampling", "mmproj_url"),
)
POOLING = (None, "last")


def load_utilities():
    """The tests' module ``utils``, with its package for model downloads mocked."""
    sys.modules["wget"] = MagicMock()
    path = Path(os.environ["TARGET_OTHERS"]) / "tests" / "utils.py"
    spec = importlib.util.spec_from_file_location("utils", path)
    utilities = sys.modules["utils"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(utilities)
    return utilities


UTILITIES = load_utilities()


class LlamaServer(UTILITIES.ServerProcess):
    def start(self, timeout_seconds=0):
        for option in OWN_OPTIONS:
            if getattr(self, option, None):
                pytest.skip(f"starts a server with {option}")
        if self.pooling not in POOLING or "gemma" in (self.model_alias or ""):
            pytest.skip("needs another pooling, or a model that sees")
        self.server_host, self.server_port = URL.hostname, URL.port

    def stop(self):
        pass

    def make_url(self, path, host=None):
        if path.split("?")[0] in OWN_PATHS:
            pytest.skip(f"{path} is a route of llama.cpp")
        return URL.geturl() + ("/v1" if path.split("?")[0] in VERSIONED else "") + path


def parallel(calls, together=UTILITIES.parallel_function_calls):
    """As the tests' own, but a skip in a thread is not lost."""
    for _, arguments in calls:
        if any(isinstance(part, str) and part in OWN_PATHS for part in arguments):
            pytest.skip("asks routes of llama.cpp at once")
    return together(calls)


UTILITIES.ServerProcess = LlamaServer
UTILITIES.parallel_function_calls = parallel
UTILITIES.match_regex = lambda pattern, text: isinstance(text, str)
