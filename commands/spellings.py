"""Options of vLLM, vLLM.rs, SGLang and llama.cpp: translated, or rejected with the alternative."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from ..shared.config.refused_options import REFUSED
from ..shared.errors import UsageError

# Other names of an option; the value stays.
RENAMED = {
    "--alias": "--served-model-name",
    "-a": "--served-model-name",
    "--api-server-count": "--router-workers",
    "--chat-template-file": "--chat-template",
    "--context-length": "--max-model-len",
    "--enforce-parser": "--tool-call-parser",
    "--hf-file": "--weight-file",
    "--hf-repo": "--model",
    "-hf": "--model",
    "-hff": "--weight-file",
    "-hfr": "--model",
    "-hft": "--hf-token",
    "-m": "--model",
    "--max-running-requests": "--max-num-seqs",
    "--model-path": "--model",
    "--n-predict": "--max-tokens",
    "-n": "--max-tokens",
    "--otlp-traces-endpoint": "--otlp-endpoint",
    "--parallel": "--max-num-seqs",
    "-np": "--max-num-seqs",
    "--predict": "--max-tokens",
    "--repeat-penalty": "--repetition-penalty",
    "--shutdown-timeout": "--drain-timeout",
    "-t": "--threads",
    "--temp": "--temperature",
    "-tp": "--tensor-parallel-size",
    "--tp-size": "--tensor-parallel-size",
    "--uvicorn-log-level": "--log-level",
}
# Switches and the equivalent options.
SWITCHES = {
    "--i": "--interactive",
    "--cpu": "--device=cpu",
    "--disable-log-stats": "--stats-interval=0",
    "--disable-radix-cache": "--no-enable-prefix-caching",
    "--disable-reasoning": '--default-chat-template-kwargs={"enable_thinking": false}',
    "--disable-uvicorn-access-log": "--no-access-log",
    "--fp8-kvcache": "--kv-cache-dtype=fp8",
    "--no-async-scheduling": "--async-scheduling=off",
    "--prefix-cache": "--enable-prefix-caching",
    "--verbose": "--log-level=debug",
}
# Switches for behaviour that Tandem always has; they are ignored.
ALWAYS_SO = {
    "--cont-batching",
    "-cb",
    "--disable-log-requests",
    "--embedding",
    "--embeddings",
    "--enable-chunked-prefill",
    "--enable-prompt-tokens-details",
    "--enable-server-load-tracking",
    "--jinja",
    "--metrics",
    "--no-enable-log-requests",
    "--no-trust-remote-code",
    "--server",
    "--ui-server",
}
# Options whose value may be omitted: their values, and the implied one.
BARE = {"--async-scheduling": (("auto", "on", "off"), "on")}
# Options that are JSON objects, whose members may be separate options.
JSON_OBJECTS = ("--default-chat-template-kwargs", "--override-generation-config")
PARSERS = {
    "deepseek": "deepseek_v3",
    "glm45_moe": "glm45",
    "glm47_moe": "glm47",
    "kimik2": "kimi_k2",
    "llama": "llama3_json",
    "qwen": "hermes",
    "qwen_coder": "qwen3_coder",
}
# Other names of values, with ours.
VALUES = {
    "--dtype": {
        "bf16": "bfloat16",
        "f16": "float16",
        "f32": "float32",
        "float": "float32",
        "half": "float16",
    },
    "--tool-call-parser": PARSERS,
}


def translate(arguments: Sequence[str], options: Collection[str]) -> list[str]:
    """The arguments in Tandem's own spelling, for a command with these ``options``.

    Raises ``UsageError`` for other servers' options that are not supported.
    """
    result: list[str] = []
    rest, objects = list(arguments), _JsonParts()
    while rest:
        argument = rest.pop(0)
        if argument == "--":
            return [*result, *objects, argument, *rest]
        if not argument.startswith("-"):
            result.append(argument)
        elif not objects.take(argument, rest):
            result += _translate(argument, rest, options)
    return [*result, *objects]


def _translate(argument: str, rest: list[str], options: Collection[str]) -> list[str]:
    """One option in our spelling. Its value is removed from ``rest`` if that is translated too."""
    name, equals, value = argument.partition("=")
    name = name.replace("_", "-")
    name = RENAMED[name] if RENAMED.get(name) in options else name
    if name in options:
        suffix, value = equals + value, value if equals else (rest[0] if rest else "")
        if name == "--device" and value.startswith("cuda:"):  # as torch names one
            raise UsageError(f"--device {value}: use --device cuda --d {value[5:]}")
        choices, implied = BARE.get(name, ((), ""))
        if choices and not equals and value not in choices:
            return [f"{name}={implied}"]
        translation = VALUES.get(name, {}).get(value)
        if translation is None:
            return [name + suffix]
        if not equals:
            rest.pop(0)
        return [f"{name}={translation}"]
    if SWITCHES.get(name, "").partition("=")[0] in options and not equals:
        return [SWITCHES[name]]
    if name in ALWAYS_SO and "--model" in options and not equals:
        return []
    if name in REFUSED:
        raise UsageError(f"{name} is not supported: {REFUSED[name]}")
    return [argument]


class _JsonParts:
    """Parts of options that are JSON objects, such as ``--override-generation-config.top_p 0.5``,
    collected into one object each."""

    def __init__(self) -> None:
        self._objects: dict[str, dict[str, Any]] = {}

    def take(self, argument: str, rest: list[str]) -> bool:
        """Take the argument, and its value from ``rest``, if it is such a part."""
        name, equals, value = argument.partition("=")
        name, dot, key = name.partition(".")
        name = name.replace("_", "-")
        if not dot or name not in JSON_OBJECTS or not (equals or rest):
            return False
        text = value if equals else rest.pop(0)
        try:
            self._objects.setdefault(name, {})[key] = json.loads(text)
        except ValueError:
            self._objects[name][key] = text
        return True

    def __iter__(self) -> Iterator[str]:
        return (f"{name}={json.dumps(value)}" for name, value in self._objects.items())
