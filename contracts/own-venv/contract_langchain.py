# mypy: ignore-errors
"""langchain-tests' standard suite over langchain-openai, against a running server."""

from __future__ import annotations

import os

from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests

URL, KEY, MODEL = (os.environ[f"TARGET_{name}"] for name in ("URL", "KEY", "MODEL"))


class TestChat(ChatModelIntegrationTests):
    """Tests that need a model which decides when to call a tool run with real models only."""

    @property
    def chat_model_class(self):
        return ChatOpenAI

    @property
    def chat_model_params(self):
        return {
            "model": MODEL,
            "base_url": f"{URL}/v1",
            "api_key": KEY,
            "max_tokens": 300,
            "temperature": 0,
            "timeout": 120,
            "max_retries": 0,
            "stream_usage": True,
        }

    @property
    def supports_image_inputs(self):
        return False
