"""Bodies of POST /v1/batches: what a new batch has of one, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.router.batches.request import (
    MAX_METADATA,
    MAX_METADATA_NAME,
    MAX_METADATA_VALUE,
    parse_batch,
)
from tandem.router.batches.store import DAY
from tandem.shared.errors import RequestError
from tandem.tests.router.batches.batch_client import CHAT, EMBEDDINGS

BODY: dict[str, Any] = {"input_file_id": "f", "endpoint": CHAT, "completion_window": "24h"}
LONGEST = {"x" * MAX_METADATA_NAME: "x" * MAX_METADATA_VALUE}
WRONG: tuple[tuple[dict[str, Any], str], ...] = (
    ({"endpoint": "/v1/x"}, "endpoint"),
    ({"input_file_id": 5}, "input_file_id"),
    ({"input_file_id": ""}, "input_file_id"),
    ({"completion_window": "soon"}, "completion_window"),
    ({"completion_window": "0h"}, "completion_window"),
    ({"completion_window": "31d"}, "completion_window"),
    ({"metadata": {"a": 1}}, "metadata"),
    ({"metadata": {str(number): "" for number in range(MAX_METADATA + 1)}}, "metadata"),
    ({"metadata": {"x" * (MAX_METADATA_NAME + 1): ""}}, "metadata"),
    ({"metadata": {"x": "x" * (MAX_METADATA_VALUE + 1)}}, "metadata"),
    ({"output_expires_after": {"anchor": "now", "seconds": 3600}}, "output_expires_after"),
    ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, "seconds"),
)


def test_a_body_is_a_new_batch() -> None:
    for window, seconds in (("24h", DAY), ("90s", 90), ("5m", 300), ("30d", 30 * DAY)):
        batch = parse_batch(BODY | {"completion_window": window}, "me", [CHAT, EMBEDDINGS])
        assert (batch.owner, batch.endpoint, batch.input_file_id) == ("me", CHAT, "f")
        assert (batch.completion_window, batch.seconds) == (window, seconds)
        assert batch.metadata is batch.output_seconds is None
    expiry = {"anchor": "created_at", "seconds": 3600}
    fields = {"metadata": LONGEST, "output_expires_after": expiry}
    batch = parse_batch(BODY | fields, "", [CHAT])
    assert (batch.metadata, batch.output_seconds) == (LONGEST, 3600)


def test_wrong_bodies_name_their_field() -> None:
    for fields, param in WRONG:
        with pytest.raises(RequestError) as refused:
            parse_batch(BODY | fields, "", [CHAT])
        assert refused.value.param == param, fields
