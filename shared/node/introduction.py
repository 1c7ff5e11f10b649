"""The introduction of one node to another, and the comparison of two of them."""

from __future__ import annotations

from ...proto import tandem_pb2 as pb
from ..config.kv_dtypes import BYTES
from ..engine.start import NodeEngine, NodeIdentity

# Raised if two versions would compute different parts or bytes of a transfer.
PROTOCOL_VERSION = 1


def introduction(engine: NodeEngine, identity: NodeIdentity) -> pb.Introduction:
    """This node's introduction to a peer."""
    return pb.Introduction(
        protocol_version=PROTOCOL_VERSION,
        node_id=identity.node_id,
        epoch=identity.epoch,
        fingerprint=engine.fingerprint,
        tensor_parallel_size=engine.world_size,
        block_size=engine.resolved.block_size,
        kv_dtype=engine.kv_dtype,
        weight_format=engine.weight_format,
        curve_keys=engine.curve_keys,
    )


def refusal(decode: pb.Introduction, prefill: pb.Introduction) -> str:
    """The reason why two nodes are incompatible, with the field and both values; empty if they are
    compatible.

    Fingerprints must be equal. Block sizes, numbers of ranks, and dtypes of KV and weights may
    differ: each side adapts, or the canary detects that the KV differs too much.
    """
    if decode.protocol_version != prefill.protocol_version:
        return (
            f"different versions of Tandem: protocol version is {decode.protocol_version} on the "
            f"decode node and {prefill.protocol_version} on the prefill node; update the older one"
        )
    for name in sorted(set(decode.fingerprint) | set(prefill.fingerprint)):
        ours = decode.fingerprint.get(name, "missing")
        theirs = prefill.fingerprint.get(name, "missing")
        if ours != theirs:
            return _mismatch(name, ours, theirs)
    unknown = [name for name in (decode.kv_dtype, prefill.kv_dtype) if name not in BYTES]
    if unknown:
        return _mismatch("KV dtype", decode.kv_dtype, prefill.kv_dtype)
    return ""


def _mismatch(field: str, decode: object, prefill: object) -> str:
    return (
        f"different models: {field} is {decode!r} on the decode node and {prefill!r} on the "
        f"prefill node; start both with the same model and options"
    )
