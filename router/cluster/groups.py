"""Groups of nodes that may serve in one cluster: those of one model, in any versions of it.

Nodes with the same fingerprint form a group, and KV passes only within a group (``place.py``).
During the rollout of a new version two groups share the model's name. A router tokenizes before it
chooses a group, so everything that concerns text must be the same in each.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...proto import tandem_pb2 as pb

TEXT_FIELDS = ("vocabulary", "chat_template", "vocab_size")


def conflict(present: Sequence[pb.ModelCard], newcomer: pb.ModelCard) -> str:
    """The reason why a node may not join those present; empty if it may. The first node may have
    any model."""
    if not present or any(card.fingerprint == newcomer.fingerprint for card in present):
        return ""
    namesakes = [card for card in present if card.name == newcomer.name]
    if not namesakes:
        card = present[0]
        return (
            f"different models: {difference(card, newcomer)} on the node ({newcomer.name!r}); "
            f"start it with the cluster's model, let it join another router, or, if it is a new "
            f"version of {card.name!r}, start it with --served-model-name {card.name}"
        )
    if text_of(namesakes[0]) != text_of(newcomer):
        return (
            f"another vocabulary or chat template of {newcomer.name!r}: "
            f"{difference(namesakes[0], newcomer, TEXT_FIELDS)} on the node; versions whose "
            f"vocabularies or templates differ need a router each"
        )
    return ""


def text_of(card: pb.ModelCard) -> tuple[str, ...]:
    """The values of ``TEXT_FIELDS``, on which the router's tokenization depends."""
    fields = _fields(card.fingerprint)
    return tuple(fields.get(name, "") for name in TEXT_FIELDS)


def field_of(card: pb.ModelCard, name: str) -> str:
    """A field of a fingerprint; empty if it has no such field."""
    return _fields(card.fingerprint).get(name, "")


def difference(
    cluster: pb.ModelCard, node: pb.ModelCard, names: Sequence[str] | None = None
) -> str:
    """The first field in which two fingerprints (``field=value`` lines) differ, with both
    values."""
    ours, theirs = _fields(cluster.fingerprint), _fields(node.fingerprint)
    for name in names or sorted(set(ours) | set(theirs)):
        here, there = ours.get(name, "missing"), theirs.get(name, "missing")
        if here != there:
            return f"{name} is {here!r} in the cluster and {there!r}"
    return "the fingerprint differs between the cluster's version of Tandem and the one"


def _fields(fingerprint: str) -> dict[str, str]:
    return dict(line.partition("=")[::2] for line in fingerprint.splitlines())
