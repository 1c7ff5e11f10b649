"""All options, each in one place: field, default, flags and help.

The command line, ``TANDEM_...`` environment variables and YAML files are generated from these
fields (``command_line.py``); there are no defaults elsewhere. Instances are frozen; ``None`` means
"auto" and is resolved once, when the cache is planned.
"""

from .engine import EngineConfig
from .handoff import HandoffConfig
from .hosts import HostsConfig
from .hub import HubConfig
from .node import NodeConfig, TelemetryConfig
from .router import RouterConfig, prefill_addresses
from .security import SecurityConfig
from .serve import ServeConfig

__all__ = [
    "EngineConfig",
    "HandoffConfig",
    "HostsConfig",
    "HubConfig",
    "NodeConfig",
    "RouterConfig",
    "SecurityConfig",
    "ServeConfig",
    "TelemetryConfig",
    "prefill_addresses",
]
