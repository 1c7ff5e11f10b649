"""Options of the router."""

from __future__ import annotations

from dataclasses import dataclass

from ...proto.packed_logprobs import MAX_LOGPROBS
from ..errors import UsageError
from ..unix_sockets import SCHEME, socket_address
from . import fields
from .access import AccessConfig
from .batches import BatchConfig
from .fields import json_object, option, split_addresses
from .limits import MAX_CONNECTIONS
from .mcp import McpConfig
from .sampling import SamplingConfig


@dataclass(frozen=True, kw_only=True)
class RouterConfig(AccessConfig, BatchConfig, McpConfig, SamplingConfig):
    """Options of the router."""

    model: str | None = option(
        None,
        "--model",
        "Model that nodes must serve, in the form of a node's --model; the router reads its "
        "configuration and tokenizer, not its weights (default: the model of the first decode node "
        "to join).",
    )
    ignore_config_keys: str | None = fields.ignore_config_keys()
    hf_overrides: str | None = fields.hf_overrides()
    served_model_name: str | None = fields.served_model_name()
    host: str = option("127.0.0.1", "--host", "Address on which HTTP is served.", host=True)
    port: int = option(8000, "--port", "HTTP port (0: any free port).", minimum=0, maximum=65535)
    registry_host: str = option(
        "127.0.0.1", "--registry-host", "Address at which nodes join.", host=True
    )
    registry_port: int = option(
        8001,
        "--registry-port",
        "Port at which nodes join (0: any free port).",
        minimum=0,
        maximum=65535,
    )
    insecure: bool = fields.insecure()
    pd_url: str | None = option(
        None,
        "--pd-url",
        "Prefill nodes that do not join themselves: host:port[,host:port], or file:///folder with "
        "their sockets.",
    )
    metrics_port: int | None = option(
        None,
        "--metrics-port",
        "Separate port of /metrics, which never requires a key and is then not served on --port "
        "(0: any free port; default: --port if clients need no key, otherwise none).",
        minimum=0,
        maximum=65535,
    )
    metrics_host: str | None = option(
        None, "--metrics-host", "Address of --metrics-port (default: --host).", host=True
    )
    pooling: str | None = option(
        None,
        "--pooling",
        "The hidden state that /v1/embeddings returns for a text: of its last token, of its first "
        "(cls), or the mean of all (default: as in the model's files, or else last).",
        choices=("last", "cls", "mean"),
    )
    max_body_bytes: int = option(
        8 << 20,
        "--max-body-bytes",
        "Maximum size of a request body in bytes; a larger one gets 413.",
        minimum=1024,
    )
    trust_request_chat_template: bool = option(
        False,
        "--trust-request-chat-template",
        "Allow requests to have their own chat template. It runs in a sandbox with limits on time "
        "and memory.",
    )
    enable_tokenizer_info_endpoint: bool = option(
        False,
        "--enable-tokenizer-info-endpoint",
        "Serve /tokenizer_info: the tokenizer's configuration with the chat template.",
    )
    strict_parameters: bool = option(
        False,
        "--strict-parameters",
        "Reject requests with fields that no API has, instead of ignoring them.",
    )
    placement_policy: str = option(
        "prefix-aware",
        "--placement-policy",
        "Choice of nodes: by the estimated time to first token (cached prefixes and queues), by "
        "the lowest load, or in turn.",
        choices=("prefix-aware", "least-loaded", "round-robin"),
    )
    shutdown_delay: float = option(
        0.0,
        "--shutdown-delay",
        "Seconds after SIGTERM, SIGINT or SIGHUP during which /ready is 503 and requests are still "
        "accepted, until load balancers notice.",
        minimum=0.0,
    )
    router_workers: int = option(
        1,
        "--router-workers",
        "Number of router processes on one HTTP port, for one core each. Nodes join all of them: "
        "each has the next port after --registry-port and --metrics-port. They share the limits on "
        "memory, connections and requests in equal parts; each has its own limits of keys (unless "
        "there is --limits-storage) and its own counts in /v1/usage and /metrics.",
        minimum=1,
        maximum=64,
    )
    max_concurrent_requests: int = option(
        1024,
        "--max-concurrent-requests",
        "Maximum number of concurrent requests; further ones get 503.",
        minimum=1,
    )
    max_connections: int = option(
        MAX_CONNECTIONS,
        "--max-connections",
        "Maximum number of HTTP connections, or fewer if the limit of open files requires it; "
        "further ones are closed at once.",
        minimum=1,
    )
    max_held_body_bytes: int = option(
        256 << 20,
        "--max-held-body-bytes",
        "Maximum bytes of all request bodies in memory, at least --max-body-bytes; beyond it "
        "clients get 503.",
        minimum=1024,
    )
    max_held_prompt_tokens: int = option(
        32 << 20,
        "--max-held-prompt-tokens",
        "Maximum prompt tokens of all requests in progress, about 20 bytes each; beyond it clients "
        "get 503.",
        minimum=1024,
    )
    max_response_bytes: int = option(
        64 << 20,
        "--max-response-bytes",
        "Maximum size of a response that is not streamed, in bytes; a request for more gets 400.",
        minimum=1024,
    )
    max_response_logprobs: int = option(
        1 << 19,
        "--max-response-logprobs",
        "Maximum number of logprobs in a response that is not streamed: of output and prompt "
        "tokens and their alternatives.",
        minimum=1024,
    )
    max_logprobs: int = option(
        20,
        "--max-logprobs",
        "Maximum number of alternatives that a request may ask for at each output or prompt token.",
        minimum=0,
        maximum=MAX_LOGPROBS,
    )
    return_tokens_as_token_ids: bool = option(
        False,
        "--return-tokens-as-token-ids",
        "Name tokens in logprobs as token_id:5, even if a request does not ask for it.",
    )
    enable_per_request_metrics: bool = option(
        False,
        "--enable-per-request-metrics",
        "Add the times of a request to its response as 'metrics', like vLLM; in a stream, to the "
        "chunk with the usage.",
    )
    max_held_response_bytes: int = option(
        1 << 30,
        "--max-held-response-bytes",
        "Maximum bytes of all responses that are not streamed, while they are built; beyond it "
        "clients get 503.",
        minimum=1024,
    )
    keep_alive_timeout: float = option(
        75.0,
        "--keep-alive-timeout",
        "Seconds that an idle HTTP connection stays open; should be longer than the load "
        "balancer's timeout.",
        minimum=1.0,
    )
    header_timeout: float = option(
        10.0,
        "--header-timeout",
        "Seconds within which the head of a request must arrive.",
        minimum=0.1,
    )
    body_timeout: float = option(
        30.0,
        "--body-timeout",
        "Seconds within which the body of a request must arrive, or each part of an uploaded file.",
        minimum=0.1,
    )
    parse_timeout: float = option(
        30.0,
        "--parse-timeout",
        "Seconds that a body may wait for a thread to parse it; then the client gets 503.",
        minimum=0.1,
    )
    send_timeout: float = option(
        30.0,
        "--send-timeout",
        "Seconds after which a client that does not read is cut off.",
        minimum=0.1,
    )
    admission_timeout: float = option(
        10.0,
        "--admission-timeout",
        "Seconds that a node may take to accept a request before another node is tried.",
        minimum=0.1,
    )
    migration_limit: int = option(
        3,
        "--migration-limit",
        "Maximum number of times that a request is continued on another node because its decode "
        "node dies or drains after the first token (0: never).",
        minimum=0,
    )
    request_timeout: float = option(
        3600.0,
        "--request-timeout",
        "Maximum seconds of a request, on all nodes together.",
        minimum=1.0,
    )
    heartbeat_seconds: float = option(
        1.0,
        "--heartbeat-seconds",
        "Seconds between heartbeats of a node; limited to a third of --node-timeout.",
        minimum=0.05,
        maximum=60.0,
    )
    node_timeout: float = option(
        3.0,
        "--node-timeout",
        "Seconds without a heartbeat after which a node and its requests count as lost.",
        minimum=0.1,
        maximum=3600.0,
    )
    max_nodes: int = option(
        1024, "--max-nodes", "Maximum number of nodes.", minimum=1, maximum=16384
    )
    drain_timeout: float = option(
        30.0,
        "--drain-timeout",
        "Seconds for running requests to finish after SIGTERM, SIGINT or SIGHUP; a second SIGTERM "
        "or SIGINT ends them at once.",
        minimum=0.0,
    )
    stats_interval: float = fields.stats_interval()
    enable_auto_tool_choice: bool = option(
        True,
        "--enable-auto-tool-choice",
        "Let the model decide whether to call tools, and parse tool calls in its output.",
    )
    tool_call_parser: str = option(
        "auto",
        "--tool-call-parser",
        "Format of the model's tool calls. auto: as in its chat template.",
        choices=(
            "auto",
            "deepseek_v3",
            "deepseek_v31",
            "functiongemma",
            "gemma4",
            "glm45",
            "glm47",
            "granite",
            "granite-20b-fc",
            "granite4",
            "hermes",
            "json",
            "kimi_k2",
            "llama3_json",
            "llama4_json",
            "llama4_pythonic",
            "mistral",
            "openai",
            "phi4_mini_json",
            "pythonic",
            "qwen3_coder",
            "qwen3_xml",
        ),
    )
    exclude_tools_when_tool_choice_none: bool = option(
        False,
        "--exclude-tools-when-tool-choice-none",
        "Omit the tools from the prompt of a request with tool_choice none.",
    )
    reasoning_parser: str = option(
        "none",
        "--reasoning-parser",
        "Format of the model's reasoning, which is separated from the content: qwen3 expects "
        "<think> and </think> in the output, deepseek_r1 only </think>, because the prompt has "
        "<think>. auto: as in its chat template.",
        choices=(
            "none",
            "auto",
            "deepseek_r1",
            "deepseek_v3",
            "ernie45",
            "gemma4",
            "glm45",
            "granite",
            "holo2",
            "hunyuan_a13b",
            "kimi_k2",
            "minimax_m2",
            "mistral",
            "olmo3",
            "openai_gptoss",
            "qwen3",
            "seed_oss",
            "step3",
        ),
    )
    access_log: bool = option(True, "--access-log", "Log one line per request, at level info.")

    def __post_init__(self) -> None:
        """Reject invalid flags before anything starts. Raises ``UsageError``."""
        prefill_addresses(self.pd_url)
        json_object("--hf-overrides", self.hf_overrides)
        self._check_access()
        self._check_sampling()
        if self.metrics_host is not None and self.metrics_port is None:
            raise UsageError("--metrics-host needs --metrics-port")

    @property
    def prefill_addresses(self) -> tuple[str, ...]:
        """The addresses of ``--pd-url``."""
        return prefill_addresses(self.pd_url)


def prefill_addresses(value: str | None) -> tuple[str, ...]:
    """The addresses of ``--pd-url`` in gRPC's form. Raises ``UsageError``."""
    parts = () if value is None else [_without_scheme(part) for part in value.split(",")]
    return tuple(
        socket_address("--pd-url", part)
        if part.startswith(SCHEME)
        else split_addresses("--pd-url", part)[0]
        for part in parts
    )


def _without_scheme(address: str) -> str:
    """The address without ``tcp://`` or ``http://``, which vLLM.rs accepts."""
    address = address.strip()
    for scheme in ("tcp://", "http://"):
        address = address.removeprefix(scheme)
    return address
