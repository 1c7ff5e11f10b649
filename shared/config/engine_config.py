"""Options of one engine."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from ..errors import UsageError
from . import fields
from .fields import check_option, option, split_names
from .kv_dtypes import AUTO, SPELLINGS

# What a model may take to be downloaded, before ranks are started.
DOWNLOAD_SECONDS = 3600.0


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What one engine runs and how much it may use."""

    model: str = option(
        "builtin",
        "--model --m --w --f",
        "Model: 'builtin', a folder in Hugging Face layout, a .safetensors file in one, or the "
        "name of a model on the Hugging Face hub.",
    )
    served_model_name: str | None = fields.served_model_name()
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
    ignore_config_keys: str | None = fields.ignore_config_keys()
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
        for item in dataclasses.fields(self):
            check_option(item.metadata, getattr(self, item.name))
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
