"""Fields of introductions on which two nodes must agree, and fields that are negotiated."""

from __future__ import annotations

import pytest

from tandem.proto import tandem_pb2 as pb
from tandem.shared.config.kv_dtypes import BYTES
from tandem.shared.node.introduction import introduction, refusal
from tandem.tests.support.fake_node import FakeNode


def introduced(**changes: object) -> pb.Introduction:
    mine = introduction(FakeNode("n", 1).engine, FakeNode("n", 1).identity)
    for name, value in changes.items():
        setattr(mine, name, value)
    return mine


def test_an_introduction_has_the_formats_of_weights_and_kv() -> None:
    node = FakeNode("n", 1, weight_format="bfloat16", kv_dtype="float8_e4m3fn")
    mine = introduction(node.engine, node.identity)
    assert (mine.weight_format, mine.kv_dtype) == ("bfloat16", "float8_e4m3fn")


@pytest.mark.parametrize("here", BYTES)
@pytest.mark.parametrize("there", BYTES)
def test_formats_of_kv_may_differ(here: str, there: str) -> None:
    assert refusal(introduced(kv_dtype=here), introduced(kv_dtype=there)) == ""


@pytest.mark.parametrize(
    "changes",
    [
        {"weight_format": "Q4_K"},
        {"weight_format": ""},
        {"block_size": 64},
        {"tensor_parallel_size": 8},
    ],
)
def test_negotiated_fields_are_not_compared(changes: dict[str, object]) -> None:
    assert (
        refusal(introduced(), introduced(**changes))
        == refusal(introduced(**changes), introduced())
        == ""
    )


def test_another_protocol_is_refused_with_both() -> None:
    reason = refusal(introduced(), introduced(protocol_version=2))
    assert "different versions of Tandem" in reason
    assert "is 1 on the decode node and 2 on the prefill node" in reason


def test_a_kv_format_that_is_not_known_is_refused_with_both() -> None:
    reason = refusal(introduced(), introduced(kv_dtype="float8_e5m2"))
    assert "KV dtype is 'float32'" in reason and "'float8_e5m2'" in reason


@pytest.mark.parametrize("there", ["4", None])
def test_a_field_of_the_fingerprint_that_differs_is_refused_with_both(there: str | None) -> None:
    theirs = introduced()
    del theirs.fingerprint["layers"]
    if there is not None:
        theirs.fingerprint["layers"] = there
    reason = refusal(introduced(), theirs)
    assert f"layers is '3' on the decode node and '{there or 'missing'}'" in reason
