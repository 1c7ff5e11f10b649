"""Options as vLLM and vLLM.rs spell them: translated, or rejected by name with the alternative."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from ..shared.errors import UsageError

# Other names of an option; the value stays.
RENAMED = {
    "--api-server-count": "--router-workers",
    "-tp": "--tensor-parallel-size",
    "--enforce-parser": "--tool-call-parser",
    "--otlp-traces-endpoint": "--otlp-endpoint",
    "--shutdown-timeout": "--drain-timeout",
    "--uvicorn-log-level": "--log-level",
}
# Switches, with the option that does the same.
SWITCHES = {
    "--i": "--interactive",
    "--cpu": "--device=cpu",
    "--disable-log-stats": "--stats-interval=0",
    "--disable-reasoning": '--default-chat-template-kwargs={"enable_thinking": false}',
    "--disable-uvicorn-access-log": "--no-access-log",
    "--fp8-kvcache": "--kv-cache-dtype=fp8",
    "--no-async-scheduling": "--async-scheduling=off",
    "--prefix-cache": "--enable-prefix-caching",
}
# Switches for what is always so here.
ALWAYS_SO = {
    "--disable-log-requests",
    "--enable-chunked-prefill",
    "--enable-prompt-tokens-details",
    "--enable-server-load-tracking",
    "--enforce-eager",
    "--no-enable-log-requests",
    "--no-trust-remote-code",
    "--server",
    "--ui-server",
}
# Options whose value may be left out, with the values that they may have and the one that is meant.
BARE = {"--async-scheduling": (("auto", "on", "off"), "on")}
# Options that are JSON objects, whose members may be options of their own.
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
# Other names of values.
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
_FILES = "a model is read from one folder or file, given as MODEL; leave it out"
_NO_OFFLOAD = "nothing is offloaded to the host's memory; --kv-fraction sizes the KV cache"
_NO_LORA = "adapters are not supported; serve a model into which they are merged"
_NO_SPECULATION = "speculative decoding is not supported; leave it out"
_NO_TLS = "HTTP is served without TLS; put a proxy in front"
_ROPE = "write rope_scaling into the model's config.json"
_GRAPHS = "no graphs are captured and nothing is compiled by torch; leave it out"
_NO_IMAGES = "models take text only; leave it out"
_NO_CODE = "code of a model or a user is never loaded; leave it out"
_NODES = "nodes on other machines join a router: tandem decode-node MODEL --join"
_TOKEN = "set the environment variable HF_TOKEN"
REFUSED = {
    "--all2all-backend": "experts are split as the rest of a model; leave it out",
    "--allowed-local-media-path": _NO_IMAGES,
    "--attention-backend": "use --decode-kernel, or --cpu-kernels",
    "--batch": "use tandem bench throughput --num-prompts",
    "--calculate-kv-scales": "int8 has scales of its own, fp8 needs none; leave it out",
    "--chat-template-content-format": "the template shows whether it takes parts; leave it out",
    "--code-revision": _NO_CODE,
    "--collect-detailed-traces": "--otlp-endpoint exports all spans; leave it out",
    "--compilation-config": _GRAPHS,
    "--config-format": _FILES,
    "--cpu-mem-fold": _NO_OFFLOAD,
    "--cpu-offload-gb": _NO_OFFLOAD,
    "--cuda-graph-sizes": _GRAPHS,
    "--data-parallel-address": _NODES,
    "--data-parallel-backend": _NODES,
    "--data-parallel-rank": _NODES,
    "--data-parallel-size": "start more nodes with --decode-nodes",
    "--data-parallel-size-local": _NODES,
    "--disable-custom-all-reduce": "ranks use NCCL or gloo alone; leave it out",
    "--disable-frontend-multiprocessing": "the router is a process of its own; leave it out",
    "--disable-sliding-window": "set sliding_window in the model's config.json",
    "--distributed-executor-backend": "ranks are processes of their node; leave it out",
    "--download-dir": "set the environment variable HF_HOME",
    "--enable-expert-parallel": "experts are split as the rest of a model; leave it out",
    "--enable-force-include-usage": "requests ask for it with stream_options.include_usage",
    "--enable-log-outputs": "contents of requests are never logged; leave it out",
    "--enable-log-requests": "contents of requests are never logged; --access-log logs the rest",
    "--enable-lora": _NO_LORA,
    "--enable-metrics": "a router serves /metrics; see --metrics-port",
    "--enable-prompt-embeds": "prompts are text or token ids; leave it out",
    "--enable-sleep-mode": "stop nodes instead (tandem nodes drain)",
    "--guided-decoding-backend": "grammars are compiled by llguidance; leave it out",
    "--headless": "start tandem decode-node MODEL --join ROUTER",
    "--hf-config-path": _FILES,
    "--hf-overrides": _ROPE,
    "--hf-token": _TOKEN,
    "--hf-token-path": _TOKEN,
    "--isq": "weights are not quantised while loading; use a GGUF file, --f FILE",
    "--kv-cache-memory-bytes": "use --num-gpu-blocks-override",
    "--kv-events-config": "nodes tell their routers by themselves; leave it out",
    "--kv-offloading-size": _NO_OFFLOAD,
    "--kv-transfer-config": "use --prefill-nodes, or --pd-server and --pd-client",
    "--limit-mm-per-prompt": _NO_IMAGES,
    "--log": "use --log-level",
    "--log-config-file": "use --log-format and --log-level",
    "--logits-processors": _NO_CODE,
    "--long-prefill-token-threshold": "use --itl-target",
    "--lora-modules": _NO_LORA,
    "--mamba-fraction": "models with states are not supported; leave it out",
    "--master-addr": _NODES,
    "--master-port": _NODES,
    "--max-log-len": "contents of requests are never logged; leave it out",
    "--max-num-partial-prefills": "use --itl-target",
    "--middleware": "no code is loaded from outside; put a proxy in front",
    "--mm-processor-kwargs": _NO_IMAGES,
    "--model-impl": "models are implemented here alone; leave it out",
    "--model-loader-extra-config": _FILES,
    "--nnodes": _NODES,
    "--node-rank": _NODES,
    "--num-speculative-tokens": _NO_SPECULATION,
    "--pipeline-parallel-size": "split the model with --tensor-parallel-size",
    "--quantization": "the checkpoint itself says how it is quantised; leave it out",
    "--reasoning-parser-plugin": _NO_CODE,
    "--response-role": "answers have the role assistant; leave it out",
    "--revision": "download that revision (hf download --revision), and give its folder as MODEL",
    "--root-path": "let the proxy strip the path",
    "--rope-scaling": _ROPE,
    "--rope-theta": _ROPE,
    "--scheduler-cls": _NO_CODE,
    "--skip-tokenizer-init": "the router needs the tokenizer; leave it out",
    "--speculative-config": _NO_SPECULATION,
    "--speculative-model": _NO_SPECULATION,
    "--ssl-ca-certs": _NO_TLS,
    "--ssl-certfile": _NO_TLS,
    "--ssl-keyfile": _NO_TLS,
    "--stream-interval": "each token is sent as soon as it is there; leave it out",
    "--structured-outputs-config": "grammars are compiled by llguidance; leave it out",
    "--swap-space": _NO_OFFLOAD,
    "--task": "generation and embeddings are served together; leave it out",
    "--tokenizer": _FILES,
    "--tokenizer-mode": "tokenizers are those of tokenizer.json; leave it out",
    "--tokenizer-revision": _FILES,
    "--tool-parser-plugin": _NO_CODE,
    "--tool-prompt": "tools are shown as the chat template has them; leave it out",
    "--tool-server": "use --mcp-config",
    "--trust-remote-code": _NO_CODE,
    "--uds": "use --host and --port",
    "--worker-cls": _NO_CODE,
    "--yarn-scaling-factor": _ROPE,
    "-dp": "start more nodes with --decode-nodes",
    "-pp": "split the model with --tensor-parallel-size",
}


def translate(arguments: Sequence[str], options: Collection[str]) -> list[str]:
    """The arguments in Tandem's own spelling, for a command with these ``options``.

    Raises ``UsageError`` for options that peers have and that cannot be honoured.
    """
    result: list[str] = []
    left, objects = list(arguments), _JsonParts()
    while left:
        argument = left.pop(0)
        if argument == "--":
            return [*result, *objects, argument, *left]
        if not argument.startswith("-"):
            result.append(argument)
        elif not objects.take(argument, left):
            result += _translated(argument, left, options)
    return [*result, *objects]


def _translated(argument: str, left: list[str], options: Collection[str]) -> list[str]:
    """One option in its own spelling. Its value is taken from ``left`` if that has another name."""
    name, equals, value = argument.partition("=")
    name = name.replace("_", "-")
    name = RENAMED[name] if RENAMED.get(name) in options else name
    if name in options:
        value = value if equals else (left[0] if left else "")
        choices, meant = BARE.get(name, ((), ""))
        if choices and not equals and value not in choices:
            return [f"{name}={meant}"]
        named = VALUES.get(name, {}).get(value)
        if named is None:
            return [name + argument[len(name) :]]
        if not equals:
            left.pop(0)
        return [f"{name}={named}"]
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

    def take(self, argument: str, left: list[str]) -> bool:
        """Take the argument, and its value from ``left``, if it is such a part."""
        name, equals, value = argument.partition("=")
        name, dot, key = name.partition(".")
        name = name.replace("_", "-")
        if not dot or name not in JSON_OBJECTS or not (equals or left):
            return False
        text = value if equals else left.pop(0)
        try:
            self._objects.setdefault(name, {})[key] = json.loads(text)
        except ValueError:
            self._objects[name][key] = text
        return True

    def __iter__(self) -> Iterator[str]:
        return (f"{name}={json.dumps(value)}" for name, value in self._objects.items())
