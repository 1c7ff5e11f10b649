"""The gRPC side of a process: the registry at which nodes join."""

from __future__ import annotations

import grpc
from prometheus_client.registry import Collector

from ...proto.tandem_pb2_grpc import add_RegistryServicer_to_server
from ...shared.security.credentials import Credentials
from ...shared.security.token_interceptor import TokenInterceptor
from ..cluster.registry_service import Registry
from ..options import RouterOptions

# A node usually has one call at a time; more of them wait, and fail only in a flood.
REGISTRY_CALLS_A_NODE = 2


class RegistryFront:
    """Serves a registry on its port; ``refused`` counts the calls without the cluster's token."""

    def __init__(
        self, options: RouterOptions, registry: Registry, credentials: Credentials
    ) -> None:
        self._options = options
        self._registry = registry
        self._credentials = credentials
        self._interceptor = TokenInterceptor(credentials, "tandem_registry_calls_refused")
        self._grpc: grpc.aio.Server | None = None

    @property
    def refused(self) -> Collector:
        return self._interceptor.refused

    async def start(self) -> int:
        """Listen, and return the port. Raises ``StartupError`` if it is taken."""
        options = self._options
        # With SO_REUSEPORT a second router on the port would silently take half of the calls.
        self._grpc = grpc.aio.server(
            options=(("grpc.so_reuseport", 0),),
            interceptors=(self._interceptor,),
            maximum_concurrent_rpcs=max(1024, REGISTRY_CALLS_A_NODE * options.max_nodes),
        )
        add_RegistryServicer_to_server(self._registry, self._grpc)
        host, port = options.registry_host, options.registry_port
        bound = self._credentials.bind(self._grpc, host, port, "the registry")
        await self._grpc.start()
        return bound

    async def stop(self) -> None:
        if self._grpc is not None:
            await self._grpc.stop(grace=0.5)
