"""The names by which models call the tools of servers: unambiguous, and valid in any template."""

from __future__ import annotations

import hashlib
import re

SEPARATOR = "__"
MAX_NAME = 64
_INVALID = re.compile(r"[^a-zA-Z0-9_-]")


def model_name(server_label: str, tool: str) -> str:
    """``LABEL__TOOL``. A name that has to be changed or cut ends with a digest of both, so that no
    two tools share one."""
    name = f"{server_label}{SEPARATOR}{tool}"
    clean = _INVALID.sub("_", name)
    if clean == name and len(name) <= MAX_NAME and SEPARATOR not in tool:
        return name
    digest = hashlib.sha256(f"{server_label}\0{tool}".encode()).hexdigest()[:8]
    return f"{clean[: MAX_NAME - 9]}_{digest}"
