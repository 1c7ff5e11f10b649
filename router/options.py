"""A router's options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..shared.config import RouterConfig
from ..shared.config.fields import json_object, served_names, split_names


@dataclass(frozen=True, kw_only=True)
class RouterOptions(RouterConfig):
    """The flags, and limits that have no flag."""

    max_header_bytes: int = 64 * 1024
    max_prompts: int = 1024
    max_choices: int = 4096
    max_n: int = 128
    retry_after: int = 1  # seconds

    @property
    def heartbeat_period(self) -> float:
        """Seconds between a node's heartbeats: short enough to lose two of them without losing the
        node."""
        return min(self.heartbeat_seconds, self.node_timeout / 3)

    @property
    def allowed_host_names(self) -> frozenset[str]:
        """The names of ``--allowed-hosts`` in lower case."""
        names = (self.allowed_hosts or "").split(",")
        return frozenset(name.strip().lower() for name in names) - {""}

    @property
    def served_names(self) -> tuple[str, ...]:
        """The names of ``--served-model-name``."""
        return served_names(self.served_model_name)

    @property
    def ignored_config_keys(self) -> frozenset[str]:
        """The keys of ``--ignore-config-keys``."""
        return split_names(self.ignore_config_keys)

    @property
    def config_overrides(self) -> dict[str, Any]:
        """The object of ``--hf-overrides``. Raises ``UsageError``."""
        return json_object("--hf-overrides", self.hf_overrides)
