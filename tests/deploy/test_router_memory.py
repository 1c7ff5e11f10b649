"""A router's memory limit covers what its own limits let clients and nodes make it hold."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.router.responses.store import MAX_BYTES as STORED_RESPONSES

from . import deployment as d
from .test_kubernetes import size

# Serving, without requests; and a node with a full prefix cache.
BASE_BYTES, NODE_BYTES = 100_000_000, 300_000
TOKEN_BYTES = 20
# Bodies while they are parsed, and whatever else a process needs for a moment.
SPARE_BYTES = 512 << 20


def max_bytes(options: dict[str, Any]) -> int:
    return (
        BASE_BYTES
        + NODE_BYTES * options["max_nodes"]
        + options["max_held_body_bytes"]
        + TOKEN_BYTES * options["max_held_prompt_tokens"]
        + options["max_held_response_bytes"]
        + STORED_RESPONSES
        + SPARE_BYTES
    )


@pytest.mark.skipif(not d.KUBECTL, reason=d.NO_KUBECTL)
@pytest.mark.parametrize("name", d.OVERLAYS)
def test_a_pod_has_memory_for_what_clients_may_have_it_hold(name: str) -> None:
    objects = d.build(d.DEPLOY / name)
    (router,) = [w for w in d.servers(objects) if d.labels(w)["tandem/part"] == "router"]
    (container,), (part,) = d.pod(router)["containers"], d.kubernetes_parts(objects, router)
    assert max_bytes(part.parse()) <= size(container["resources"]["limits"]["memory"])


@pytest.mark.parametrize("path", d.COMPOSE_FILES, ids=lambda path: path.stem)
def test_a_service_has_memory_for_what_clients_may_have_it_hold(path: Any) -> None:
    limit = d.services(path)["router"]["mem_limit"]
    assert max_bytes(d.compose_part(path, "router").parse()) <= int(limit.removesuffix("g")) << 30
