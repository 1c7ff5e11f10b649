"""Every option, once: its field, default, flag names and help.

The command line, ``TANDEM_...`` environment variables and YAML files are generated from these
fields; nothing else has a default. Instances are frozen; ``None`` stands for "auto" and is resolved
once, by ``resolve_engine``, into a ``ResolvedEngine``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from math import inf
from typing import Any

from .devices import NodeDevice
from .errors import StartupError, UsageError
from .kv.formats import AUTO, SPELLINGS
from .limits import MAX_PEERS, MOST_PEERS
from .meeting import SCHEME, meeting_address

# What a model may take to be downloaded, before ranks are started.
DOWNLOAD_SECONDS = 3600.0


def option(
    default: Any,
    flags: str,
    help: str,
    *,
    choices: tuple[str, ...] | None = None,
    minimum: float | None = None,
    maximum: float | None = None,
    environment: tuple[str, ...] = (),
    secret: bool = False,
) -> Any:
    """A dataclass field that is also a flag; of ``flags``, the first is its name.

    ``environment`` are variables beside ``TANDEM_...``, which goes first. An empty variable of a
    ``secret`` is not the same as none.
    """
    metadata = {
        "flags": flags.split(),
        "help": help,
        "choices": choices,
        "minimum": minimum,
        "maximum": maximum,
        "environment": environment,
        "secret": secret,
    }
    return field(default=default, metadata=metadata)


def _check(about: Mapping[str, Any], value: Any) -> None:
    """Raise ``UsageError`` for a value that an option does not take; ``about`` is its metadata."""
    flag, choices = about["flags"][0], about["choices"]
    if choices and value not in choices:
        raise UsageError(f"{flag} {value!r} is not supported; use {' or '.join(choices)}")
    low, high = about["minimum"], about["maximum"]
    low, high = -inf if low is None else low, inf if high is None else high
    if isinstance(value, (int, float)) and not low <= value <= high:
        raise UsageError(f"{flag} {value!r} is out of range: it must be from {low:g} to {high:g}")


def _served_model_name() -> Any:
    """Nodes announce the name, and a router may insist on one: the same flag for both."""
    return option(
        None, "--served-model-name", "Name that clients use; the model's own if not given."
    )


def _ignore_config_keys() -> Any:
    """Nodes read the model's configuration, and so does a router that was told its model."""
    return option(
        None,
        "--ignore-config-keys",
        "Keys of the model's config.json to treat as if they were not there, separated by commas: "
        "for keys that are refused as unknown although they do not change what the model computes.",
    )


def split_names(value: str | None) -> frozenset[str]:
    """The names of a list with commas."""
    return frozenset(name.strip() for name in (value or "").split(",") if name.strip())


def _insecure() -> Any:
    """Nodes and routers listen for each other: the same flag for both."""
    return option(
        False,
        "--insecure",
        "Listen for other machines without TLS and a cluster token: the network is trusted.",
    )


@dataclass(frozen=True, kw_only=True)
class LockConfig:
    """What keeps strangers off the planes. Raises ``UsageError`` for half a lock."""

    tls_cert: str | None = option(
        None,
        "--tls-cert",
        "PEM file with this process's certificate, and those between it and the authority: the "
        "control plane uses TLS, and the data plane CURVE.",
    )
    tls_key: str | None = option(
        None, "--tls-key", "PEM file with the private key of --tls-cert, not encrypted."
    )
    tls_ca: str | None = option(
        None,
        "--tls-ca",
        "PEM file with the cluster's authorities: both ends of a connection must show one of their "
        "certificates (default: servers must, by a public authority; clients need none).",
    )
    tls_name: str | None = option(
        None,
        "--tls-name",
        "Name that the certificates of others must have (default: the host that is called).",
    )
    cluster_token: str | None = option(
        None,
        "--cluster-token",
        "Secret that parts of this cluster show each other; arguments are visible to other users, "
        "so give it in the environment or as a file (default: on loopback tandem serve makes one, "
        "which other commands of its user find).",
        secret=True,
    )
    cluster_token_file: str | None = option(
        None,
        "--cluster-token-file",
        "File with the cluster token; further lines are tokens that are accepted too. It is read "
        "again when it changes, as are the files of --tls-cert, --tls-key and --tls-ca.",
        secret=True,
    )

    def __post_init__(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            given, missing = ("--tls-cert", "--tls-key")[:: 1 if self.tls_cert else -1]
            raise UsageError(f"{given} needs {missing}: a certificate and its key go together")
        for flag, value in (("--tls-ca", self.tls_ca), ("--tls-name", self.tls_name)):
            if value is not None and self.tls_cert is None:
                raise UsageError(f"{flag} {value} needs --tls-cert and --tls-key: there is no TLS")
        if self.cluster_token is not None and self.cluster_token_file is not None:
            raise UsageError("--cluster-token and --cluster-token-file: give one of them")
        if self.cluster_token == "":
            raise UsageError("--cluster-token is empty, which would let everybody in")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What one engine runs and how much it may use."""

    model: str = option(
        "builtin",
        "--model --m --w --f",
        "Model: 'builtin', a folder in Hugging Face layout, a .safetensors file in one, or the "
        "name of a model on the Hugging Face hub.",
    )
    served_model_name: str | None = _served_model_name()
    dtype: str = option(
        "auto",
        "--dtype",
        "Weights and activations. auto: as the checkpoint says (float16 becomes bfloat16 on CPUs).",
        choices=("auto", "float32", "float16", "bfloat16"),
    )
    kv_cache_dtype: str = option(
        "auto",
        "--kv-cache-dtype",
        "KV cache. auto: as the weights; fp8 (e4m3) takes half the memory of bfloat16 and holds no "
        "value above 448.",
        choices=(AUTO, *SPELLINGS),
    )
    device: str = option("auto", "--device", "Where ranks run.", choices=("auto", "cpu", "cuda"))
    devices: str | None = option(
        None, "--d --devices", "CUDA devices of the ranks, such as 0,1; sets the number of ranks."
    )
    tensor_parallel_size: int | None = option(
        None,
        "--tensor-parallel-size --tp",
        "Ranks that share one model (default: as many as devices, else 1).",
        minimum=1,
        maximum=64,
    )
    load_format: str = option(
        "auto",
        "--load-format",
        "auto reads safetensors; dummy fills the weights with seeded random numbers (benchmarks).",
        choices=("auto", "safetensors", "dummy"),
    )
    ignore_config_keys: str | None = _ignore_config_keys()
    load_timeout: float = option(
        1800.0,
        "--load-timeout",
        "Seconds that a rank may take to open its device, to load its weights, or to allocate its "
        "cache: each of the three.",
        minimum=0.01,
    )
    block_size: int = option(
        16, "--block-size", "Token slots of a KV block.", minimum=1, maximum=1024
    )
    max_model_len: int | None = option(
        None, "--max-model-len", "Longest prompt plus output, in tokens.", minimum=2
    )
    max_num_seqs: int = option(
        64, "--max-num-seqs", "Sequences that may run at once.", minimum=1, maximum=65536
    )
    max_num_batched_tokens: int | None = option(
        None,
        "--max-num-batched-tokens",
        "Tokens of one step, so also the longest prompt chunk (default: 512 on CPUs, 2048 on "
        "GPUs).",
        minimum=1,
    )
    itl_target: float | None = option(
        None,
        "--itl-target",
        "Milliseconds that a step may take on average while streams decode: prompts are cut to fit "
        "(default: 3 times a step without prompts; 0: chunks are never cut for it).",
        minimum=0.0,
    )
    max_waiting: int = option(
        1024, "--max-waiting", "Sequences that may wait; beyond it requests get 503.", minimum=1
    )
    kv_fraction: float | None = option(
        None,
        "--kv-fraction",
        "Share for the KV cache of the memory that is free once the weights are loaded (default: "
        "what max-model-len x max-num-seqs needs, at most 0.3 on CPUs and 0.9 on GPUs).",
        minimum=0.0,
        maximum=1.0,
    )
    gpu_memory_utilization: float | None = option(
        None,
        "--gpu-memory-utilization",
        "Share of each GPU's whole memory that this node may use for weights, steps and KV cache "
        "together; the cache gets what is left of it. Instead of --kv-fraction; not used on CPUs.",
        minimum=0.0,
        maximum=1.0,
    )
    nodes_per_device: int | None = option(
        None,
        "--nodes-per-device",
        "Nodes that share the memory of each device of this one, and plan for equal parts of it "
        "(default: as many as one command starts there).",
        minimum=1,
        maximum=64,
    )
    num_blocks: int | None = option(
        None,
        "--num-gpu-blocks-override",
        "Blocks of the KV cache, instead of planning them from memory.",
        minimum=1,
    )
    scheduling_policy: str = option(
        "fcfs",
        "--scheduling-policy",
        "Which waiting sequence runs first; a request's 'priority' counts only with priority.",
        choices=("fcfs", "priority", "shortest-first"),
    )
    enable_prefix_caching: bool = option(
        True, "--enable-prefix-caching", "Reuse the KV of prompts that start alike."
    )
    prefix_cache_max_tokens: int | None = option(
        None,
        "--prefix-cache-max-tokens",
        "Tokens of unreferenced prefixes to keep (default: as long as nobody needs the blocks).",
        minimum=0,
    )
    seed: int = option(0, "--seed", "Seed of the weights of --load-format dummy.")
    threads: int | None = option(
        None, "--threads", "CPU threads of a rank (default: cores divided by ranks).", minimum=1
    )
    cpu_kernels: str = option(
        "torch",
        "--cpu-kernels",
        "What a CPU computes with: torch's operators, or kernels compiled by numba, which are "
        "faster (pip install 'tandem-llm[cpu]'; the first start takes some seconds longer).",
        choices=("torch", "compiled"),
    )
    decode_kernel: str = option(
        "auto",
        "--decode-kernel",
        "What decodes on a GPU: triton, all sequences of a step at once, or torch, one after the "
        "other, which takes many times as long in large batches. auto: triton; where it cannot "
        "run, an error with --device cuda, else torch and a warning.",
        choices=("auto", "triton", "torch"),
    )

    def __post_init__(self) -> None:
        """Python may give any value: the same are refused as on the command line. Raises
        ``UsageError``."""
        for item in fields(self):
            _check(item.metadata, getattr(self, item.name))
        if self.kv_fraction is not None and self.gpu_memory_utilization is not None:
            raise UsageError(
                "--kv-fraction and --gpu-memory-utilization both size the KV cache: give one of "
                "them"
            )

    @property
    def device_ids(self) -> tuple[int, ...]:
        """The CUDA devices named by ``--d``. Raises ``UsageError`` for anything but numbers."""
        if self.devices is None:
            return ()
        try:
            ids = tuple(int(part) for part in self.devices.split(","))
        except ValueError:
            raise UsageError(
                f"--d {self.devices!r} is not a list of device numbers such as 0,1"
            ) from None
        if len(set(ids)) != len(ids) or min(ids) < 0:
            raise UsageError(f"--d {self.devices!r} names a device twice or a negative one")
        return ids

    @property
    def ignored_config_keys(self) -> frozenset[str]:
        """The keys named by ``--ignore-config-keys``."""
        return split_names(self.ignore_config_keys)

    @property
    def start_timeout(self) -> float:
        """Seconds that an engine may take to start by its own limits. Whoever waits for one waits
        as long, or ends a load that is only slow."""
        return DOWNLOAD_SECONDS + 3 * self.load_timeout

    @property
    def world_size(self) -> int:
        """Number of ranks. Raises ``UsageError`` when two options contradict each other."""
        ids = self.device_ids
        size = self.tensor_parallel_size
        if ids and size is not None and len(ids) != size:
            raise UsageError(
                f"--d {self.devices} names {len(ids)} devices, but --tensor-parallel-size is "
                f"{size}; drop one of them"
            )
        return size or len(ids) or 1


@dataclass(frozen=True, kw_only=True)
class HandoffConfig:
    """How KV moves, and when it does not."""

    kv_host: str = option(
        "127.0.0.1", "--kv-host", "Address that the data plane of a prefill node listens on."
    )
    kv_port: int = option(
        0,
        "--kv-port",
        "First port of a prefill node's data plane, of which each rank takes two (0: any free "
        "ones).",
        minimum=0,
        maximum=65000,
    )
    kv_advertise: str | None = option(
        None,
        "--kv-advertise",
        "host:port that decode nodes reach the first port of a prefill node's data plane at, if "
        "not where it listens; the others follow it.",
    )
    carrier: str = option(
        "auto",
        "--carrier",
        "What moves KV between ranks (auto: on one host CUDA IPC between GPUs, else shared memory; "
        "TCP otherwise). nixl, over RDMA where the network has it, is for both sides to ask for.",
        choices=("auto", "cuda_ipc", "shared_memory", "tcp", "nixl"),
    )
    insecure: bool = _insecure()
    staging_bytes: int = option(
        32 << 20, "--staging-bytes", "Staging memory of a rank.", minimum=1 << 20
    )
    window_bytes: int | None = option(
        None,
        "--window-bytes",
        "Bytes of one transfer that may be on the way (default: 8 MiB; 64 MiB from GPU to GPU).",
        minimum=1 << 16,
    )
    prefill_threshold: int | None = option(
        None,
        "--prefill-threshold",
        "Prompts with fewer uncached tokens are prefilled locally, all others are not (default: "
        "estimated for each prompt from measured rates; 64 until they are known).",
        minimum=1,
    )
    lease_seconds: float = option(
        10.0, "--lease-seconds", "How long a prefill node holds KV without a renewal.", minimum=0.5
    )
    transfer_timeout: float = option(
        120.0,
        "--transfer-timeout",
        "Seconds that a prefill node may keep a prompt waiting while it computes nothing at all, "
        "neither for it nor for those ahead. A transfer that makes progress has no limit but its "
        "request's.",
        minimum=0.1,
    )
    progress_timeout: float = option(
        2.5,
        "--progress-timeout",
        "Seconds without a sign of life from the other side that end an attempt; peers give one a "
        "second.",
        minimum=1.5,
    )
    max_peers: int = option(
        MAX_PEERS,
        "--max-peers",
        "Prefill nodes that a decode node meets, decode nodes that a prefill node admits, and "
        "ranks that may be connected with one of its ranks; no more are taken.",
        minimum=1,
        maximum=MOST_PEERS,
    )

    def kv_port_of(self, rank: int) -> int:
        """The first of the two ports, bulk and control, of a rank; 0: any."""
        return self.kv_port and self.kv_port + 2 * rank

    def kv_advertised(self, rank: int) -> tuple[str, str] | None:
        """Where others reach the two ports of a rank; ``None``: where it listens.

        Raises ``UsageError``.
        """
        if self.kv_advertise is None:
            return None
        addresses = split_addresses("--kv-advertise", self.kv_advertise)
        if len(addresses) != 1:
            raise UsageError(f"--kv-advertise {self.kv_advertise!r}: a node has one first port")
        host, _, port = addresses[0].rpartition(":")
        first = int(port) + 2 * rank
        if not 0 < int(port) <= first < 65535:
            raise UsageError(f"--kv-advertise {self.kv_advertise!r}: rank {rank} has no port")
        return f"tcp://{host}:{first}", f"tcp://{host}:{first + 1}"


@dataclass(frozen=True, kw_only=True)
class TelemetryConfig:
    """What a process tells of its work, beside its metrics."""

    log_format: str = option(
        "text",
        "--log-format",
        "Lines of the log: for people, or for programs.",
        choices=("text", "json"),
    )
    log_level: str = option(
        "info",
        "--log-level",
        "The least important lines of the log that are written.",
        choices=("debug", "info", "warning", "error"),
    )
    otlp_endpoint: str | None = option(
        None,
        "--otlp-endpoint",
        "OpenTelemetry collector that gets a trace of each request, such as "
        "http://127.0.0.1:4318 (default: none). Needs the extra 'otel'.",
        environment=("OTEL_EXPORTER_OTLP_ENDPOINT",),
    )


def _stats_interval() -> Any:
    """Nodes and routers log the same line."""
    return option(
        10.0,
        "--stats-interval",
        "Seconds between two lines of the log about throughput, queues and KV usage, while there "
        "is work (0: none).",
        minimum=0.0,
    )


@dataclass(frozen=True, kw_only=True)
class NodeConfig:
    """One head process: where it listens, and which routers it joins."""

    host: str = option("127.0.0.1", "--host", "Address to listen on.")
    port: int = option(
        0, "--port", "Port of the control plane (0: any free one).", minimum=0, maximum=65535
    )
    health_port: int = option(
        0, "--health-port", "Port of /health, /ready and /metrics.", minimum=0, maximum=65535
    )
    join: str | None = option(
        None, "--join", "Registries of the routers to join, host:port, separated by commas."
    )
    node_id: str | None = option(None, "--node-id", "Name of this node (default: made up).")
    advertise: str | None = option(
        None, "--advertise", "host:port that others reach this node at, if not what it listens on."
    )
    drain_timeout: float = option(
        30.0, "--drain-timeout", "Seconds that SIGTERM leaves running requests.", minimum=0.0
    )
    stats_interval: float = _stats_interval()

    @property
    def routers(self) -> tuple[str, ...]:
        return split_addresses("--join", self.join)

    @property
    def advertised(self) -> str:
        """Where others reach this node; empty: where it listens. Raises ``UsageError``."""
        addresses = split_addresses("--advertise", self.advertise)
        if len(addresses) > 1:
            raise UsageError(f"--advertise {self.advertise!r}: a node has one address")
        return addresses[0] if addresses else ""


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """The HTTP front."""

    model: str | None = option(
        None,
        "--model",
        "Model that nodes must have, as for a node; the router reads its configuration and "
        "tokenizer, not its weights (default: that of the first decode node to join).",
    )
    ignore_config_keys: str | None = _ignore_config_keys()
    served_model_name: str | None = _served_model_name()
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
    insecure: bool = _insecure()
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
    stats_interval: float = _stats_interval()
    access_log: bool = option(
        True, "--access-log", "One line of the log for each request, at level info."
    )


def prefill_addresses(value: str | None) -> tuple[str, ...]:
    """The nodes of ``--pd-url``, as gRPC calls them. Raises ``UsageError``."""
    parts = () if value is None else [part.strip() for part in value.split(",")]
    return tuple(
        meeting_address("--pd-url", part)
        if part.startswith(SCHEME)
        else split_addresses("--pd-url", part)[0]
        for part in parts
    )


def split_addresses(flag: str, value: str | None) -> tuple[str, ...]:
    """``host:port[,host:port]`` as a tuple. Raises ``UsageError`` for anything else."""
    if value is None:
        return ()
    addresses = tuple(part.strip() for part in value.split(","))
    for address in addresses:
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit() or not 0 <= int(port) <= 65535:
            raise UsageError(f"{flag} {address!r} is not host:port, such as 127.0.0.1:8100")
    return addresses


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedEngine:
    """An ``EngineConfig`` in which nothing is left open."""

    num_blocks: int
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    prefix_cache_max_blocks: int | None


def resolve_engine(
    config: EngineConfig,
    *,
    context: int,
    bytes_per_block: int,
    free_bytes: int,
    device: NodeDevice,
) -> ResolvedEngine:
    """Plan the KV cache from the model and the memory of the smallest rank.

    ``context`` is the model's own limit in tokens; ``bytes_per_block`` counts all layers of one
    rank, and ``free_bytes`` is what its cache may take. Raises ``StartupError`` when not even one
    sequence of two tokens fits.
    """
    if config.max_model_len is not None and config.max_model_len > context:
        raise StartupError(
            f"--max-model-len {config.max_model_len} is over the model's context of {context} "
            f"tokens; lower it"
        )
    length = config.max_model_len or context
    share, fixed = _cache_share(config, device)
    affordable = int(free_bytes * share) // bytes_per_block
    wanted = -(-length // config.block_size) * config.max_num_seqs
    if config.num_blocks is not None:
        blocks = config.num_blocks
        room = free_bytes // bytes_per_block
        if blocks > room:
            raise StartupError(
                f"--num-gpu-blocks-override {blocks} needs {blocks * bytes_per_block} bytes, but "
                f"{free_bytes} are free; use at most {room}{_sharing(device)}"
            )
    else:
        blocks = affordable if fixed else min(affordable, wanted)
    if blocks * config.block_size < 2:
        raise StartupError(
            f"no memory for one KV block: a block takes {bytes_per_block} bytes and "
            f"{int(free_bytes * share)} are allowed; raise --kv-fraction or free memory"
            f"{_sharing(device)}"
        )
    slots = blocks * config.block_size
    if slots < length:
        if config.max_model_len is not None:
            raise StartupError(
                f"--max-model-len {length} needs {length} token slots, but {blocks} blocks of "
                f"{config.block_size} give {slots}; lower it or raise --kv-fraction"
                f"{_sharing(device)}"
            )
        length = slots
    limit = config.prefix_cache_max_tokens
    return ResolvedEngine(
        num_blocks=blocks,
        block_size=config.block_size,
        max_model_len=length,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens or device.token_budget,
        prefix_cache_max_blocks=None if limit is None else limit // config.block_size,
    )


def _cache_share(config: EngineConfig, device: NodeDevice) -> tuple[float, bool]:
    """How much of what the cache may take it is to take, and whether the user has said so."""
    if config.kv_fraction is not None:
        return config.kv_fraction, True
    if config.gpu_memory_utilization is not None and not device.on_cpu:
        return 1.0, True
    return device.cache_fraction, False


def _sharing(device: NodeDevice) -> str:
    if device.nodes == 1:
        return ""
    return f", or let fewer nodes share the device (--nodes-per-device is {device.nodes})"


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """Which processes ``tandem serve`` starts."""

    pd_server: bool = option(
        False, "--pd-server", "Start a prefill node only; --pd-url is where it listens."
    )
    pd_client: bool = option(
        False,
        "--pd-client",
        "Start a router and a decode node that use the prefill nodes of --pd-url.",
    )
    prefill_nodes: int = option(
        0, "--prefill-nodes", "Prefill nodes to start on this machine.", minimum=0, maximum=64
    )
    decode_nodes: int = option(
        1, "--decode-nodes", "Decode nodes to start on this machine.", minimum=1, maximum=64
    )
    # Its own parts are told the port, so two clusters on one machine need not agree on them.
    registry_port: int = option(
        0,
        "--registry-port",
        "Port that nodes of other commands join at (0: any free one, which the greeting shows).",
        minimum=0,
        maximum=65535,
    )
    log_dir: str = option("logs", "--log-dir", "Folder for one log file a process.")
    start_timeout: float | None = option(
        None,
        "--start-timeout",
        "Seconds that all processes may take to be ready, and a node that is started again "
        "(default: three times --load-timeout and an hour for a download, so that only a node's "
        "own limits end its load).",
        minimum=1.0,
    )
