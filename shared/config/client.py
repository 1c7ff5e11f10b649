"""Options of the programs that talk to a server: where it is, and how answers are sampled."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from ..errors import UsageError
from .fields import option, split_list
from .sampling_fields import LARGEST_INT, with_number_options


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
        None, "--model-name", "Model to request (default: the first that the server lists)."
    )
    timeout: float = option(
        600.0,
        "--timeout",
        "Give up after this many seconds without a byte from the server.",
        minimum=0.1,
    )

    @property
    def key(self) -> str:
        """The key to send. ``TANDEM_API_KEY`` may be that of a server, which lists several, with
        names and limits."""
        first = (self.api_key or "").split(",")[0]
        words = first.rpartition(": ")[2].split()
        return words[0] if words else ""


@dataclass(frozen=True, kw_only=True)
@with_number_options("{help}")
class RequestConfig:
    """Sampling parameters of requests; those that are left out are the server's."""

    max_tokens: int | None = option(
        None, "--max-tokens", "Maximum tokens of an answer.", minimum=1, maximum=LARGEST_INT
    )
    seed: int | None = option(None, "--seed", "Random seed; the same seed draws the same tokens.")
    stop: str | None = option(None, "--stop", "String that ends an answer.")

    @property
    def parameters(self) -> dict[str, Any]:
        """The members of a request that are given."""
        named = ((item.name, getattr(self, item.name)) for item in fields(RequestConfig))
        return {name: value for name, value in named if value is not None}


@dataclass(frozen=True, kw_only=True)
class ChatConfig:
    """Options of ``tandem chat``."""

    system_prompt: str | None = option(
        None, "--system-prompt", "First message, with the role system."
    )
    quick: str | None = option(None, "--quick -q", "Send this message, print the answer, and exit.")
    mcp: str | None = option(
        None,
        "--mcp",
        "Labels of the router's MCP servers whose tools the model may use, separated by commas.",
    )
    stats: bool = option(False, "--stats", "Show tokens and times after each answer.")
    markdown: bool = option(True, "--markdown", "Format answers, if the output is a terminal.")
    history: bool = option(
        True,
        "--history",
        "Remember what you type, for the arrow keys: the last 1,000 lines, in "
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
    quick: str | None = option(None, "--quick -q", "A single prompt; '|' does not separate.")
    input: str | None = option(
        None,
        "--input",
        "JSONL file of prompts, or - for standard input. Each line is a string, or an object with "
        "prompt or messages and any request parameters.",
    )
    output: str | None = option(
        None, "--output", "JSONL file for the results, written once all are complete."
    )
    json: bool = option(False, "--json", "Print results as JSONL.")
    chat: bool = option(
        False, "--chat", "Send each prompt as a message of a chat, instead of text to continue."
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
    # Answers come whole, and may have waited for many others.
    timeout: float = option(3600.0, "--timeout", "Maximum seconds for one request.", minimum=0.1)

    @property
    def files(self) -> tuple[str, str]:
        """Input and output. Raises ``UsageError`` if one is not given."""
        given = {"-i REQUESTS.jsonl": self.input_file, "-o RESULTS.jsonl": self.output_file}
        missing = [flag for flag, name in given.items() if not name]
        if missing:
            raise UsageError(f"run-batch needs {' and '.join(missing)}")
        if self.input_file == self.output_file:
            raise UsageError(f"-i and -o are the same file, {self.input_file}")
        return self.input_file or "", self.output_file or ""
