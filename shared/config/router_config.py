"""Options of the router."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import UsageError
from ..unix_sockets import SCHEME, socket_address
from . import fields
from .fields import option, split_addresses


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """The HTTP front."""

    model: str | None = option(
        None,
        "--model",
        "Model that nodes must have, as for a node; the router reads its configuration and "
        "tokenizer, not its weights (default: that of the first decode node to join).",
    )
    ignore_config_keys: str | None = fields.ignore_config_keys()
    served_model_name: str | None = fields.served_model_name()
    host: str = option("127.0.0.1", "--host", "Address to listen on.")
    port: int = option(8000, "--port", "HTTP port (0: any free one).", minimum=0, maximum=65535)
    registry_host: str = option("127.0.0.1", "--registry-host", "Address that nodes join at.")
    registry_port: int = option(
        8001,
        "--registry-port",
        "Port that nodes join at (0: any free one).",
        minimum=0,
        maximum=65535,
    )
    insecure: bool = fields.insecure()
    pd_url: str | None = option(
        None,
        "--pd-url",
        "Prefill nodes that do not join by themselves: host:port[,host:port], or file:///folder of "
        "their sockets.",
    )
    api_key: str | None = option(
        None,
        "--api-key",
        "Keys that clients must show, separated by commas (default: none).",
        secret=True,
    )
    api_key_file: str | None = option(
        None,
        "--api-key-file",
        "File with keys that clients must show, one a line; read again when it changes.",
        secret=True,
    )
    metrics_port: int | None = option(
        None,
        "--metrics-port",
        "Port of /metrics, which is never asked for a key and then not on --port (0: any free one; "
        "default: --port, if clients need no key, else none).",
        minimum=0,
        maximum=65535,
    )
    metrics_host: str | None = option(
        None, "--metrics-host", "Address of --metrics-port (default: --host)."
    )
    allowed_hosts: str | None = option(
        None,
        "--allowed-hosts",
        "Host names that clients may use besides localhost and IP addresses, separated by commas; "
        "* allows any (default: *, but none where --host is loopback and there is no --api-key).",
    )
    max_body_bytes: int = option(
        32 << 20, "--max-body-bytes", "Largest request body; a larger one gets 413.", minimum=1024
    )
    placement_policy: str = option(
        "prefix-aware",
        "--placement-policy",
        "Which node gets a request: the one estimated to have its first token soonest by what it "
        "holds and what is queued there, the one with the least to do, or each in its turn.",
        choices=("prefix-aware", "least-loaded", "round-robin"),
    )
    shutdown_delay: float = option(
        0.0,
        "--shutdown-delay",
        "Seconds after SIGTERM in which /ready is 503 and requests are still taken: as long as a "
        "load balancer needs to notice.",
        minimum=0.0,
    )
    max_concurrent_requests: int = option(
        1024, "--max-concurrent-requests", "Beyond it clients get 503.", minimum=1
    )
    max_connections: int = option(
        4096, "--max-connections", "HTTP connections; more are closed at once.", minimum=1
    )
    max_held_body_bytes: int = option(
        256 << 20,
        "--max-held-body-bytes",
        "Bytes of request bodies that are held at the same time, never less than --max-body-bytes; "
        "beyond it clients get 503.",
        minimum=1024,
    )
    max_held_prompt_tokens: int = option(
        32 << 20,
        "--max-held-prompt-tokens",
        "Prompt tokens of all requests in progress, some 20 bytes each; beyond it clients get 503.",
        minimum=1024,
    )
    max_answer_bytes: int = option(
        64 << 20,
        "--max-answer-bytes",
        "What a request may ask for in one answer that is not streamed; a larger one gets 400.",
        minimum=1024,
    )
    max_answer_logprobs: int = option(
        1 << 19,
        "--max-answer-logprobs",
        "Likewise, in tokens with a logprob: those generated and of the prompt, with their "
        "alternatives.",
        minimum=1024,
    )
    max_held_answer_bytes: int = option(
        1 << 30,
        "--max-held-answer-bytes",
        "Bytes of all answers that are not streamed, while they are made; beyond it clients get "
        "503.",
        minimum=1024,
    )
    keep_alive_timeout: float = option(
        75.0,
        "--keep-alive-timeout",
        "Seconds that an idle HTTP connection is kept open; more than the load balancer's own.",
        minimum=1.0,
    )
    admission_timeout: float = option(
        10.0,
        "--admission-timeout",
        "Seconds that a node has for its first answer; then another node is asked.",
        minimum=0.1,
    )
    request_timeout: float = option(
        3600.0,
        "--request-timeout",
        "Seconds that a request may take, on however many nodes.",
        minimum=1.0,
    )
    heartbeat_seconds: float = option(
        1.0,
        "--heartbeat-seconds",
        "Seconds between two heartbeats of a node; never more than a third of --node-timeout.",
        minimum=0.05,
        maximum=60.0,
    )
    node_timeout: float = option(
        3.0,
        "--node-timeout",
        "Seconds without a heartbeat after which a node is lost, and its requests with it.",
        minimum=0.1,
        maximum=3600.0,
    )
    max_nodes: int = option(1024, "--max-nodes", "Nodes that may join.", minimum=1, maximum=16384)
    drain_timeout: float = option(
        30.0, "--drain-timeout", "Seconds that SIGTERM leaves running requests.", minimum=0.0
    )
    stats_interval: float = fields.stats_interval()
    access_log: bool = option(
        True, "--access-log", "One line of the log for each request, at level info."
    )

    def __post_init__(self) -> None:
        """Reject invalid flags before anything starts. Raises ``UsageError``."""
        prefill_addresses(self.pd_url)
        if not all(self.api_keys):
            raise UsageError("--api-key has an empty key, which would admit everybody")
        if self.metrics_host is not None and self.metrics_port is None:
            raise UsageError("--metrics-host needs --metrics-port")

    @property
    def api_keys(self) -> tuple[str, ...]:
        """Those of --api-key."""
        return () if self.api_key is None else tuple(k.strip() for k in self.api_key.split(","))

    @property
    def asks_for_keys(self) -> bool:
        return bool(self.api_keys) or self.api_key_file is not None

    @property
    def prefill_addresses(self) -> tuple[str, ...]:
        """Prefill nodes that do not join by themselves."""
        return prefill_addresses(self.pd_url)


def prefill_addresses(value: str | None) -> tuple[str, ...]:
    """The nodes of ``--pd-url``, as gRPC calls them. Raises ``UsageError``."""
    parts = () if value is None else [part.strip() for part in value.split(",")]
    return tuple(
        socket_address("--pd-url", part)
        if part.startswith(SCHEME)
        else split_addresses("--pd-url", part)[0]
        for part in parts
    )
