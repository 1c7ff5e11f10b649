"""Everything that can be set about a router."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

MIB = 1024 * 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterOptions:
    """Seconds and bytes throughout; port 0 takes any free port.

    ``model_path`` is where tokenizer and template are; without it, the first node that joins says.
    ``request_timeout`` is the whole request, ``admission_timeout`` until a node's first answer.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    registry_host: str = "127.0.0.1"
    registry_port: int = 8001
    model_path: Path | None = None
    served_model_names: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()

    max_body_bytes: int = 32 * MIB
    max_header_bytes: int = 64 * 1024
    max_connections: int = 4096
    max_concurrent_requests: int = 1024
    max_prompts: int = 1024
    max_choices: int = 4096
    max_n: int = 128

    header_timeout: float = 10.0
    body_timeout: float = 30.0
    send_timeout: float = 30.0
    keep_alive_timeout: float = 75.0
    admission_timeout: float = 10.0
    request_timeout: float = 3600.0
    drain_timeout: float = 30.0
    retry_after: int = 1

    heartbeat_seconds: float = 1.0
    node_timeout: float = 3.0
    max_nodes: int = 1024
