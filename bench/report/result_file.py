"""Result files with vLLM's names and format."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...shared.errors import UsageError

# Lists with an entry for each request, only written with --save-detailed.
DETAILS = (
    "input_lens",
    "output_lens",
    "start_times",
    "ttfts",
    "itls",
    "generated_texts",
    "errors",
)


def default_name(settings: Mapping[str, Any], model: str, now: str) -> str:
    """The name of a result file by vLLM's pattern, from the options of the command."""
    label = settings["label"] or settings["backend"]
    if settings["ramp_up_strategy"]:
        first, last = settings["ramp_up_start_rps"], settings["ramp_up_end_rps"]
        rate = f"ramp-up-{settings['ramp_up_strategy']}-{first}qps-{last}qps"
    else:
        rate = f"{settings['request_rate']}qps"
    limit = settings["max_concurrency"]
    concurrency = "" if limit is None else f"-concurrency{limit}"
    return f"{label}-{rate}{concurrency}-{model.rpartition('/')[2]}-{now}.json"


def check_writable(*names: str | None) -> None:
    """Create the folders of files. Raises ``UsageError`` if a file cannot be written, before
    anything is measured."""
    for path in (Path(name) for name in names if name):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"cannot write {path}: {error.strerror}") from None
        if path.is_dir():
            raise UsageError(f"cannot write {path}: it is a folder")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise UsageError(f"cannot write {path}: permission denied")


def write_result(path: Path, result: Mapping[str, Any], *, append: bool = False) -> None:
    """Write a result as one line of JSON. Raises ``UsageError`` if the file cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+" if append else "w", encoding="utf-8") as file:
            file.write("\n" * (append and file.tell() != 0) + json.dumps(result))
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from None


def read_detailed(path: Path) -> dict[str, Any]:
    """The last result in a file, with details. Raises ``UsageError``."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        result = json.loads(lines[-1] if lines else "")
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise UsageError(f"{path} is not a result of tandem bench serve: not JSON") from None
    missing = [name for name in DETAILS if not isinstance(result, dict) or name not in result]
    if missing:
        raise UsageError(
            f"{path} has no {missing[0]}; a result of tandem bench serve --save-result "
            "--save-detailed is expected"
        )
    return dict(result)
