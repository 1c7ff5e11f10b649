"""Every route of the app requires the key that it should."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from fastapi.routing import APIRoute

from tandem.router import app
from tandem.router.http.access_log import PROBES
from tandem.tests.router.support import cluster

# Not on this port if clients need a key.
METRICS = "/metrics"
# Files without data; the page fetches data with a key.
PAGE = {"/", "/cluster", "/web/path"}
FORMS = (
    lambda key: {"authorization": f"Bearer {key}"},
    lambda key: {"x-api-key": key},
)
WRONG = ("wrong", "Secret", "secret-", "x" * 10_000)


def routes() -> Iterator[tuple[str, str]]:
    """Methods and paths of all routes, with values for path parameters."""
    for api in app.APIS:
        for route in api.router.routes:
            assert isinstance(route, APIRoute), route
            for method in route.methods or ():
                yield method, route.path_format.replace("{", "").replace("}", "")


def is_admins(path: str) -> bool:
    return path.startswith("/admin/") or path == "/shutdown"


async def test_every_route_requires_the_right_key(tmp_path: Path) -> None:
    documented = set(routes())
    assert len(documented) > 25 and {path for _, path in documented} >= PROBES
    async with cluster(tmp_path, api_key="secret", admin_api_key="root") as c:
        for method, path in sorted(documented):
            open_to_all = (await c.client.request(method, path)).status_code
            if path in PROBES | PAGE:
                assert open_to_all == (404 if path.startswith("/web/") else 200), path
                continue
            assert open_to_all == (404 if path == METRICS else 401), path
            for form in FORMS:
                for key in WRONG if path != METRICS else ():
                    response = await c.client.request(method, path, headers=form(key))
                    assert response.status_code == 401, (path, key[:10])
                users = await c.client.request(method, path, headers=form("secret"))
                assert (users.status_code == 403) == is_admins(path), path
                assert users.status_code != 401
                if path != "/shutdown":
                    admins = await c.client.request(method, path, headers=form("root"))
                    assert admins.status_code not in (401, 403), path
        assert not c.router.app.services.draining


async def test_admin_routes_are_off_without_an_admin_key(tmp_path: Path) -> None:
    headers = {"authorization": "Bearer secret"}
    for key in (None, "secret"):
        async with cluster(tmp_path, api_key=key) as c:
            for method, path in routes():
                if is_admins(path):
                    response = await c.client.request(method, path, headers=headers)
                    assert response.status_code == 403
                    assert response.json()["error"]["code"] == "no_admin_key"


async def test_an_admin_key_alone_leaves_the_api_open(tmp_path: Path) -> None:
    async with cluster(tmp_path, admin_api_key="root") as c:
        assert (await c.complete()).status_code == 200
        assert (await c.client.get("/metrics")).status_code == 200
        assert (await c.client.post("/shutdown")).status_code == 401
        headers = {"authorization": "Bearer root"}
        assert (await c.client.get("/admin/nodes", headers=headers)).status_code == 200
