"""The shape of an error in OpenAI's API."""

from __future__ import annotations

from typing import Any


def check(response: Any, status: int) -> dict[str, Any]:
    """The error object of an error response."""
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert "Traceback" not in response.text and "/work" not in response.text
    return body["error"]
