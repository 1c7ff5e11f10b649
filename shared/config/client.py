"""Options of clients: the connection to a server, and the parameters of requests."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from ..errors import UsageError
from .fields import option, split_list
from .sampling_fields import MAX_INT, with_number_options


@dataclass(frozen=True, kw_only=True)
class ConnectionConfig:
    """A server with OpenAI's API."""

    url: str = option(
        "http://127.0.0.1:8000/v1",
        "--url",
        "Server with OpenAI's API, with or without the path /v1.",
    )
    api_key: str | None = option(
        None,
        "--api-key",
        "API key for the server. Arguments are visible to other users, so pass it in the "
        "environment.",
        environment=("OPENAI_API_KEY",),
    )
    model_name: str | None = option(
        None, "--model-name", "Model to request (default: the first in the server's list)."
    )
    timeout: float = option(
        600.0,
        "--timeout",
        "Give up after this many seconds without a byte from the server.",
        minimum=0.1,
    )

    @property
    def key(self) -> str:
        """The key to send: the first one, because ``TANDEM_API_KEY`` may be set for a server, with
        several keys, their names and limits."""
        first = (self.api_key or "").split(",")[0]
        words = first.rpartition(": ")[2].split()
        return words[0] if words else ""


@dataclass(frozen=True, kw_only=True)
@with_number_options("{help}")
class RequestConfig:
    """Sampling parameters of requests; the server has the defaults."""

    max_tokens: int | None = option(
        None, "--max-tokens", "Maximum number of output tokens.", minimum=1, maximum=MAX_INT
    )
    seed: int | None = option(None, "--seed", "Random seed; the same seed draws the same tokens.")
    stop: str | None = option(None, "--stop", "String that ends the output.")

    @property
    def parameters(self) -> dict[str, Any]:
        """The members of a request that are set."""
        values = ((item.name, getattr(self, item.name)) for item in fields(RequestConfig))
        return {name: value for name, value in values if value is not None}


@dataclass(frozen=True, kw_only=True)
class ChatConfig:
    """Options of ``tandem chat``."""

    system_prompt: str | None = option(None, "--system-prompt", "First message, with role system.")
    quick: str | None = option(None, "--quick -q", "Send this message, print the reply, and exit.")
    mcp: str | None = option(
        None,
        "--mcp",
        "Labels of the router's MCP servers whose tools the model may use, separated by commas.",
    )
    stats: bool = option(False, "--stats", "Show tokens and times after each reply.")
    markdown: bool = option(True, "--markdown", "Format replies, if the output is a terminal.")
    history: bool = option(
        True,
        "--history",
        "Keep the last 1,000 lines of input for the arrow keys, in "
        "~/.local/state/tandem/chat_history.",
    )

    @property
    def tools(self) -> list[dict[str, str]]:
        """The tools of requests."""
        return [{"type": "mcp", "server_label": name} for name in split_list("--mcp", self.mcp)]


@dataclass(frozen=True, kw_only=True)
class CompleteConfig:
    """Options of ``tandem complete``."""

    prompts: str | None = option(
        None, "--prompts", "Prompts, separated by '|', such as 'What is 7 plus 5? | Who are you?'."
    )
    quick: str | None = option(None, "--quick -q", "A single prompt, which may contain '|'.")
    input: str | None = option(
        None,
        "--input",
        "JSONL file of prompts, or - for standard input. Each line is a string, or an object with "
        "'prompt' or 'messages' and any parameters of requests.",
    )
    output: str | None = option(
        None, "--output", "JSONL file for the results, written once all are complete."
    )
    json: bool = option(False, "--json", "Print results as JSONL.")
    chat: bool = option(
        False, "--chat", "Send each prompt as a chat message instead of text to complete."
    )
    max_concurrency: int = option(
        8, "--max-concurrency", "Maximum number of requests in flight.", minimum=1, maximum=4096
    )
    stats: bool = option(False, "--stats", "Show tokens and times at the end.")


@dataclass(frozen=True, kw_only=True)
class RunBatchConfig:
    """Options of ``tandem run-batch``."""

    input_file: str | None = option(
        None,
        "--input-file -i",
        "JSONL file of requests in the format of OpenAI's batches; a path, or an http(s) URL.",
    )
    output_file: str | None = option(
        None,
        "--output-file -o",
        "File for the results, in the order of the requests; a path, or an http(s) URL for PUT.",
    )
    output_tmp_dir: str | None = option(
        None,
        "--output-tmp-dir",
        "Folder for results until all are complete (default: the folder of --output-file, or the "
        "system's temporary folder if that is a URL).",
    )
    max_concurrency: int = option(
        64, "--max-concurrency", "Maximum number of requests in flight.", minimum=1, maximum=4096
    )
    # Responses are not streamed, and may wait for many others.
    timeout: float = option(3600.0, "--timeout", "Maximum seconds for one request.", minimum=0.1)

    @property
    def files(self) -> tuple[str, str]:
        """Input and output. Raises ``UsageError`` if one is missing."""
        options = {"-i REQUESTS.jsonl": self.input_file, "-o RESULTS.jsonl": self.output_file}
        missing = [flag for flag, name in options.items() if not name]
        if missing:
            raise UsageError(f"run-batch needs {' and '.join(missing)}")
        if self.input_file == self.output_file:
            raise UsageError(f"-i and -o are the same file, {self.input_file}")
        return self.input_file or "", self.output_file or ""
