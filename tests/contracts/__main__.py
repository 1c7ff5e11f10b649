"""Published clients against ``tandem serve builtin``, each in a virtual environment of its own:

    python -m tandem.tests.contracts NAME [--url URL --key KEY]

A name is one of ``SUITES``. The environment is made at the first run, in a folder of the user's
cache, with the packages of its suite. With ``--url`` a running server is asked instead.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import subprocess
import sys
import time
import urllib.request
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).parent / "own-venv"
VENVS = Path.home() / ".cache" / "tandem" / "contracts"
KEY = "contract-key"
MODEL = "tandem-builtin"
# The built-in model rambles; a short context ends what a client does not limit.
SERVED = ("--max-model-len=2048", "--enable-tokenizer-info-endpoint", "--registry-port=0")
SERVERS = {
    MODEL: (
        *("tandem", "serve", "builtin", *SERVED),
        *(f"--api-key={KEY}", f"--batch-dir={VENVS / 'batches'}"),
    ),
    "tiny": ("tandem.tests.contracts.scripted_server", f"--key={KEY}"),
}
STARTING_SECONDS = 120
PYTEST = ("pytest", "pytest-asyncio")


@dataclass(frozen=True)
class Suite:
    """``packages`` of pip and ``npm``, and the command of one suite, in which {url}, {key}, {model}
    and {scripts} are filled in; several commands run one after the other. The server has ``model``,
    a name of ``SERVERS``."""

    packages: tuple[str, ...]
    commands: tuple[tuple[str, ...], ...]
    npm: tuple[str, ...] = ()
    model: str = MODEL


def _by_pytest(name: str, *packages: str, **fields: Any) -> Suite:
    command = ("python", "-m", "pytest", f"{{scripts}}/contract_{name}.py")
    return Suite((*packages, *PYTEST), (command,), **fields)


def _comply(kind: str, *options: str) -> tuple[str, ...]:
    asked = ("-u", "{url}/v1", "-k", "{key}", "-m", "{model}", "--format", kind, "--timeout", "120")
    return ("llm-comply", "run", *asked, *options)


# Of schemathesis: not every request that a schema allows is served (ids and sizes depend on the
# model), and routes for operators, of the Ollama library and with side effects are left out.
FUZZING = (
    "schemathesis run {url}/openapi.json --checks all --continue-on-failure --no-color --seed 1 "
    "--exclude-checks positive_data_acceptance,negative_data_rejection,ignored_auth "
    "--exclude-path-regex shutdown|admin|api/(pull|push|create|copy|delete) --warnings off "
    "--generation-database none --request-timeout 120 --max-time 300 -n 8 -H"
)
AGENTS = ("@anthropic-ai/claude-code", "@openai/codex", "opencode-ai")
SUITES = {
    "agents": _by_pytest("agents", npm=AGENTS, model="tiny"),
    "openai": _by_pytest("openai", "openai"),
    "anthropic": _by_pytest("anthropic", "anthropic"),
    "litellm": _by_pytest("litellm", "litellm", "mcp"),
    "langchain": _by_pytest("langchain", "langchain-openai", "langchain-tests", model="tiny"),
    "ollama": _by_pytest("ollama", "ollama"),
    "llm-comply": Suite(
        ("llm-comply",),
        (
            _comply("openai-chat"),
            _comply("open-responses"),
            _comply("anthropic", "--auth-header", "x-api-key", "--no-bearer"),
        ),
    ),
    "schemathesis": Suite(("schemathesis",), ((*FUZZING.split(), "Authorization: Bearer {key}"),)),
}


def main() -> int:
    """Run one suite; the status is the last command's that failed."""
    parser = argparse.ArgumentParser(prog="python -m tandem.tests.contracts")
    parser.add_argument("name", choices=sorted(SUITES))
    parser.add_argument("--url", help="a running server (default: one is started)")
    parser.add_argument("--key", default=KEY)
    asked = parser.parse_args()
    suite = SUITES[asked.name]
    folder = _environment(asked.name, suite)
    binaries = folder / "bin"
    with _served(asked.url, suite.model) as url:
        filled = {"url": url, "key": asked.key, "model": suite.model, "scripts": str(SCRIPTS)}
        given = {"TARGET_URL": url, "TARGET_KEY": asked.key, "TARGET_MODEL": suite.model}
        given["TARGET_NODE_MODULES"] = str(folder / "node_modules")
        status = 0
        for command in suite.commands:
            program, *arguments = (part.format(**filled) for part in command)
            ran = subprocess.run([binaries / program, *arguments], env=os.environ | given)
            status = ran.returncode or status
    return status


def _environment(name: str, suite: Suite) -> Path:
    """The suite's virtual environment, which is made if it is not there."""
    folder = VENVS / name
    if not (folder / "complete").exists():
        venv.create(folder, clear=True, with_pip=True)
        subprocess.run([folder / "bin" / "pip", "install", "--quiet", *suite.packages], check=True)
        if suite.npm:
            subprocess.run(["npm", "install", "--prefix", folder, *suite.npm], check=True)
        (folder / "complete").touch()
    return folder


@contextlib.contextmanager
def _served(url: str | None, model: str) -> Iterator[str]:
    """The URL of the server: the given one, or one that runs while the block does."""
    if url is not None:
        yield url.rstrip("/")
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", *SERVERS[model], f"--port={port}"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        _await_health(f"http://127.0.0.1:{port}", process)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(60)


def _await_health(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + STARTING_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"{url}/health", timeout=5).close()
            return
        time.sleep(0.2)
    raise SystemExit("the server did not start")


if __name__ == "__main__":
    sys.exit(main())
