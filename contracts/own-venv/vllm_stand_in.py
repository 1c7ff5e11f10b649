# mypy: ignore-errors
"""vLLM's endpoint tests against a running server: vLLM and torch are mocked, and tests use the
server at TARGET_URL, or their own server if they start one with any of ``OWN_OPTIONS``. Tests
without a server are deselected."""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import inspect
import os
import sys
import types
from unittest.mock import MagicMock
from urllib.parse import urlsplit

import anthropic
import openai
from own_server import started
from transformers import AutoTokenizer

URL = os.environ["TARGET_URL"]
KEY = "EMPTY"
CLIENT = {"api_key": KEY, "max_retries": 0}
# The tests' own timeouts are for GPUs.
SECONDS = 120
# Imported before torch is mocked: transformers would use the mock.
TOKENIZER = AutoTokenizer.from_pretrained(os.environ["REAL_MODEL"])
UTILITIES = ("tests.utils", "others.utils")
MOCKED = ("vllm", "torch", "tests")
SERVED = ("RemoteOpenAIServer", "server", "client")
# Options that the shared server lacks.
OWN_OPTIONS = ("--enable-per-request-metrics", "--return-tokens-as-token-ids")
# Servers with an option that Tandem lacks.
LEFT_OUT = ("watermarked",)


class Mocked(types.ModuleType):
    """A module or package that has every attribute."""

    __path__ = ()

    def __getattr__(self, name):
        if name.startswith("__") and name != "__version__":
            raise AttributeError(name)
        value = MagicMock(name=f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in MOCKED or name in UTILITIES:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return Mocked(spec.name)

    def exec_module(self, module):
        if module.__name__ in UTILITIES:
            module.RemoteOpenAIServer = VllmServer
            module.ROCM_EXTRA_ARGS = []
        if module.__name__ == "vllm.tokenizers":
            module.get_tokenizer = lambda *positional, **named: TOKENIZER
        if module.__name__ == "vllm":
            module.envs = MagicMock(VLLM_USE_RUST_FRONTEND=False)
        if module.__name__ == "vllm.version":
            module.__version__ = os.environ["TARGET_VERSION"]
        if module.__name__ == "vllm.config":
            config = types.SimpleNamespace(get_vocab_size=lambda: len(TOKENIZER))
            module.ModelConfig = lambda *positional, **named: config
        if module.__name__ == "torch":
            module.iinfo = lambda dtype: types.SimpleNamespace(min=-(2**63), max=2**63 - 1)


class VllmServer:
    """The interface of vLLM's server for tests."""

    DUMMY_API_KEY = KEY

    def __init__(self, model, options=(), **named):
        self._options = [name for name in OWN_OPTIONS if name in options]
        self._own = contextlib.ExitStack()
        self._ask(URL)

    def _ask(self, url):
        self.url_root, self.host, self.port = url, urlsplit(url).hostname, urlsplit(url).port

    def __enter__(self):
        if self._options:
            self._ask(self._own.enter_context(started(*self._options)))
        return self

    def __exit__(self, *raised):
        self._own.close()

    def url_for(self, *parts):
        return "/".join((self.url_root, *parts))

    def get_client(self, **options):
        return openai.OpenAI(base_url=self.url_for("v1"), timeout=SECONDS, **CLIENT)

    def get_async_client(self, **options):
        timeout = options.get("timeout", SECONDS)
        return openai.AsyncOpenAI(base_url=self.url_for("v1"), timeout=timeout, **CLIENT)

    def get_client_anthropic(self, **options):
        return anthropic.Anthropic(base_url=self.url_root, timeout=SECONDS, **CLIENT)

    def get_async_client_anthropic(self, **options):
        return anthropic.AsyncAnthropic(base_url=self.url_root, timeout=SECONDS, **CLIENT)


def pytest_collection_modifyitems(config, items):
    asking = [item for item in items if _asks_a_server(item)]
    config.hook.pytest_deselected(items=[item for item in items if item not in asking])
    items[:] = asking


def _asks_a_server(item):
    if any(name in item.name for name in LEFT_OUT):
        return False
    fixtures = any(served in name for name in item.fixturenames for served in SERVED)
    return fixtures or SERVED[0] in inspect.getsource(item.function)


sys.meta_path.insert(0, Finder())
