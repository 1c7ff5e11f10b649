"""Options of a router about stored responses, files and batches."""

from __future__ import annotations

from dataclasses import dataclass

from .fields import option

OFF = "off"


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """Options about stored responses, and about files and batches."""

    max_stored_responses: int = option(
        4096,
        "--max-stored-responses",
        "Maximum number of responses of /v1/responses to keep, in --batch-dir or in memory; the "
        "oldest are removed.",
        minimum=1,
    )
    response_lifetime: float = option(
        24 * 3600.0,
        "--response-lifetime",
        "Seconds that a response of /v1/responses can be read again or continued.",
        minimum=1.0,
    )

    batch_dir: str | None = option(
        None,
        "--batch-dir",
        "Folder for files, batches and their results, and for stored responses; 'off' disables "
        "/v1/files and /v1/batches, and keeps responses in memory (default: "
        "tandem/batches/HOST-PORT in $XDG_STATE_HOME, that is ~/.local/state; off with --port 0).",
    )
    batch_concurrency: int = option(
        16,
        "--batch-concurrency",
        "Maximum number of concurrent requests of all batches; nodes serve other requests first.",
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
        "Maximum number of files in --batch-dir, including the results of batches.",
        minimum=1,
    )
    max_stored_bytes: int = option(
        20 << 30,
        "--max-stored-bytes",
        "Maximum bytes of all files in --batch-dir, including the results of batches.",
        minimum=1024,
    )
