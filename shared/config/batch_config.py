"""Options of a router about files and batches."""

from __future__ import annotations

from dataclasses import dataclass

from .fields import option


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """Options about /v1/files and /v1/batches, which are off without a folder."""

    batch_dir: str | None = option(
        None,
        "--batch-dir",
        "Folder in which files, batches and their results are kept (default: /v1/files and "
        "/v1/batches are off).",
    )
    batch_concurrency: int = option(
        16,
        "--batch-concurrency",
        "Requests of all batches that run at once; nodes serve all others first.",
        minimum=1,
        maximum=4096,
    )
    max_file_bytes: int = option(
        200 << 20,
        "--max-file-bytes",
        "Maximum size of an uploaded file in bytes; a larger one gets 413.",
        minimum=1024,
    )
    max_files: int = option(
        10_000,
        "--max-files",
        "Maximum number of files in --batch-dir, with the results of batches.",
        minimum=1,
    )
    max_stored_bytes: int = option(
        20 << 30,
        "--max-stored-bytes",
        "Maximum bytes of all files in --batch-dir, with the results of batches.",
        minimum=1024,
    )
