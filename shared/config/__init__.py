"""Every option, once: its field, default, flag names and help.

The command line, ``TANDEM_...`` environment variables and YAML files are generated from these
fields (``command_line.py``); nothing else has a default. Instances are frozen; ``None`` stands for
"auto" and is resolved once, when the cache is planned.
"""

from .engine_config import EngineConfig
from .handoff_config import HandoffConfig
from .hub_config import HubConfig
from .node_config import NodeConfig, TelemetryConfig
from .router_config import RouterConfig, prefill_addresses
from .security_config import SecurityConfig
from .serve_config import ServeConfig

__all__ = [
    "EngineConfig",
    "HandoffConfig",
    "HubConfig",
    "NodeConfig",
    "RouterConfig",
    "SecurityConfig",
    "ServeConfig",
    "TelemetryConfig",
    "prefill_addresses",
]
