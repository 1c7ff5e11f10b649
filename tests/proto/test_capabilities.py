"""The table of capabilities, and what a request needs by it."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.proto import capabilities
from tandem.proto import tandem_pb2 as pb
from tandem.proto.capabilities import (
    ALLOWED_TOKEN_IDS,
    BASE,
    BITS,
    CAPABILITIES,
    EMBEDDINGS,
    FIELDS,
    OF_PROTOCOL_2,
    from_bits,
    has,
    needed,
    to_bits,
)


def messages_of(*descriptors: Any) -> dict[str, Any]:
    """The messages that requests to nodes are made of, by name, without map entries."""
    found = {each.name: each for each in descriptors}
    for each in descriptors:
        parts = [field.message_type for field in each.fields if field.message_type is not None]
        found |= messages_of(*(part for part in parts if not part.GetOptions().map_entry))
    return found


def test_every_field_of_a_request_to_a_node_is_in_the_table() -> None:
    messages = messages_of(pb.GenerateRequest.DESCRIPTOR, pb.OpenRequest.DESCRIPTOR)
    assert {name: set(table) for name, table in FIELDS.items()} == {
        name: set(message.fields_by_name) for name, message in messages.items()
    }
    named = {name for table in FIELDS.values() for name in table.values()}
    assert named - {BASE} <= CAPABILITIES and set(BITS) <= CAPABILITIES
    assert set(FIELDS["OpenRequest"].values()) - {BASE} <= set(BITS)


def test_a_request_needs_the_capabilities_of_the_fields_that_are_set() -> None:
    plain = pb.GenerateRequest(
        prompt=[1, 2],
        sampling=pb.Sampling(temperature=1, seed=0, logit_bias={3: 1.0}),
        prefill=[pb.PrefillCandidate(node_id="p")],
    )
    assert needed(plain) == frozenset()
    plain.sampling.allowed_token_ids.append(5)
    assert needed(plain) == {ALLOWED_TOKEN_IDS}
    assert needed(pb.OpenRequest(transfer_id=1, resume_at=7)) == frozenset()


def test_a_capability_of_a_part_of_a_message_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FIELDS["PrefillCandidate"], "epoch", "epochs")
    request = pb.GenerateRequest(prefill=[pb.PrefillCandidate(), pb.PrefillCandidate(epoch=2)])
    assert needed(request) == {"epochs"}


def test_a_prefill_node_needs_only_what_a_transfer_carries(monkeypatch: pytest.MonkeyPatch) -> None:
    none: frozenset[str] = frozenset()
    assert not has(none, {ALLOWED_TOKEN_IDS}, prefill=False)
    assert has(none, {ALLOWED_TOKEN_IDS}, prefill=True)
    assert has({ALLOWED_TOKEN_IDS}, {ALLOWED_TOKEN_IDS}, prefill=False)
    monkeypatch.setattr(capabilities, "_OF_TRANSFERS", frozenset({ALLOWED_TOKEN_IDS}))
    assert not has(none, {ALLOWED_TOKEN_IDS}, prefill=True)


def test_bits_of_introductions_keep_their_meaning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes of other versions read them."""
    assert to_bits(CAPABILITIES) == OF_PROTOCOL_2 == 3
    monkeypatch.setitem(BITS, EMBEDDINGS, 4)
    assert (to_bits(CAPABILITIES), to_bits(set())) == (7, 3)
    assert from_bits(7 | 1 << 60) == {EMBEDDINGS}
    assert from_bits(0) == from_bits(3) == frozenset()
