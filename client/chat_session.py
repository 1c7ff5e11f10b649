"""``tandem chat``: a conversation and its commands."""

from __future__ import annotations

from ..shared.config.client_config import ChatConfig, RequestConfig
from .chat_commands import COMMANDS, run_command
from .line_input import LineInput, line_editing
from .openai_server import OpenAIServer
from .terminal_chat import TerminalChat


def run_chat(server: OpenAIServer, config: ChatConfig, asked: RequestConfig) -> None:
    """Chat until the user ends it, or once for ``--quick``."""
    chat = TerminalChat(server, config, asked.parameters)
    if config.quick is not None:
        chat.ask_once(config.quick)
        return
    with line_editing([f"/{name}" for name in COMMANDS], keep=config.history):
        chat.run(LineInput(), run_command)
