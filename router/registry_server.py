"""The gRPC side of a router: the registry, where nodes join."""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc
from prometheus_client.registry import Collector

from ..proto.tandem_pb2_grpc import add_RegistryServicer_to_server
from ..shared.process.open_files import RESERVED_PART, open_file_limit
from ..shared.security.credentials import PINGED, Credentials, check_exposure, connection_limits
from ..shared.security.token_interceptor import TokenInterceptor
from .options import RouterOptions

if TYPE_CHECKING:
    from .cluster.registry_service import Registry

# A node usually has one connection with one RPC at a time.
REGISTRY_RPCS_A_NODE = 2


class RegistryServer:
    """The registry's gRPC server, whose port can be bound before the registry exists. ``refused``
    counts RPCs without the cluster's token."""

    def __init__(self, options: RouterOptions, credentials: Credentials) -> None:
        self.port = 0
        self._options = options
        self._credentials = credentials
        self._interceptor = TokenInterceptor(credentials, "tandem_registry_requests_refused")
        self._grpc: grpc.aio.Server | None = None

    @property
    def refused(self) -> Collector:
        return self._interceptor.refused

    def bind(self) -> int:
        """Bind the port, and return it; RPCs wait until ``start``. Call in the event loop that will
        serve.

        Raises ``StartupError`` if the port is in use, ``UsageError`` if it would be open to other
        machines without credentials.
        """
        options, host = self._options, self._options.registry_host
        check_exposure(self._credentials, options.insecure, {"--registry-host": host})
        max_rpcs = max(1024, REGISTRY_RPCS_A_NODE * options.max_nodes)
        connections = min(max_rpcs, open_file_limit() // RESERVED_PART)
        # With SO_REUSEPORT a second router on the same port would silently take half of the RPCs.
        self._grpc = grpc.aio.server(
            options=(("grpc.so_reuseport", 0), *PINGED, *connection_limits(connections)),
            interceptors=(self._interceptor,),
            maximum_concurrent_rpcs=max_rpcs,
        )
        self.port = self._credentials.bind(self._grpc, host, options.registry_port, "the registry")
        return self.port

    async def start(self, registry: Registry) -> int:
        """Serve ``registry``, and return the port. Binds the port first if needed, and raises as
        ``bind`` does."""
        if self._grpc is None:
            self.bind()
        assert self._grpc is not None
        add_RegistryServicer_to_server(registry, self._grpc)
        await self._grpc.start()
        return self.port

    async def stop(self) -> None:
        if self._grpc is not None:
            await self._grpc.stop(grace=0.5)
