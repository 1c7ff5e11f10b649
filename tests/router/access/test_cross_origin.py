"""CORS: other origins are allowed only if an option names them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tandem.tests.router.support import cluster

PAGE = "https://app.example"
BODY = {"prompt": "hi", "max_tokens": 2}
PREFLIGHT = {
    "origin": PAGE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type",
}


async def test_no_origin_is_allowed_by_default(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        preflight = await c.client.options("/v1/completions", headers=PREFLIGHT)
        assert (
            preflight.status_code == 405 and "access-control-allow-origin" not in preflight.headers
        )
        response = await c.client.post("/v1/completions", json=BODY, headers={"origin": PAGE})
        assert "access-control-allow-origin" not in response.headers


@pytest.mark.parametrize("origins", ["*", '["*"]', f"https://b.example, {PAGE}", f'["{PAGE}"]'])
async def test_named_origins_get_responses_streams_and_errors(tmp_path: Path, origins: str) -> None:
    async with cluster(tmp_path, api_key="a", allowed_origins=origins) as c:
        preflight = await c.client.options("/v1/completions", headers=PREFLIGHT)
        assert preflight.status_code == 200
        allowed = preflight.headers["access-control-allow-headers"]
        assert "authorization" in allowed or allowed == "*"
        headers = {"origin": PAGE, "authorization": "Bearer a"}
        bodies: tuple[tuple[dict[str, Any], int], ...] = (
            (BODY, 200), ({**BODY, "stream": True}, 200), ({**BODY, "n": 0}, 400),
        )  # fmt: skip
        for body, status in bodies:
            response = await c.client.post("/v1/completions", json=body, headers=headers)
            assert response.status_code == status
            expected = "*" if "*" in origins else PAGE
            assert response.headers["access-control-allow-origin"] == expected
            assert "retry-after" in response.headers["access-control-expose-headers"]
        denied = await c.client.post("/v1/completions", json=BODY, headers={"origin": PAGE})
        assert denied.status_code == 401 and "access-control-allow-origin" in denied.headers
        if "*" not in origins:
            other = {**headers, "origin": "https://evil.example"}
            response = await c.client.post("/v1/completions", json=BODY, headers=other)
            assert "access-control-allow-origin" not in response.headers
