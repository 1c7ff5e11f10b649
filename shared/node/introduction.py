"""What two nodes must agree on before KV passes between them."""

from __future__ import annotations

from ...proto import tandem_pb2 as pb
from ..engine.start import NodeEngine, NodeIdentity
from ..handoff.wire import kv_formats as formats

PROTOCOL_VERSION = 1
# Bits that both sides must know to use. WINDOWS: sends no more of a layer than its window shows.
# GUARDED: the ports of an open data plane want the process's epoch as a password.
CAPABILITY_WINDOWS = 1
CAPABILITY_GUARDED = 2
CAPABILITIES = CAPABILITY_WINDOWS | CAPABILITY_GUARDED


def introduction(engine: NodeEngine, identity: NodeIdentity) -> pb.Introduction:
    """What this node tells a peer of itself."""
    return pb.Introduction(
        protocol_version=PROTOCOL_VERSION,
        capabilities=CAPABILITIES,
        node_id=identity.node_id,
        epoch=identity.epoch,
        fingerprint=engine.fingerprint,
        tensor_parallel_size=engine.world_size,
        block_size=engine.resolved.block_size,
        kv_dtype=engine.kv_dtype,
        weight_format=engine.weight_dtype,
        curve_keys=engine.curve_keys,
    )


def refusal(decode: pb.Introduction, prefill: pb.Introduction) -> str:
    """Why the two may not hand over, naming the field and both values; empty when they may.

    What a fingerprint covers must be equal. Block sizes, numbers of ranks and formats of KV and of
    weights may differ: each side adapts, or the canary finds that they differ too much.
    """
    if decode.protocol_version != prefill.protocol_version:
        return _differ("protocol version", decode.protocol_version, prefill.protocol_version)
    for name in sorted(set(decode.fingerprint) | set(prefill.fingerprint)):
        ours = decode.fingerprint.get(name, "missing")
        theirs = prefill.fingerprint.get(name, "missing")
        if ours != theirs:
            return _differ(name, ours, theirs)
    unknown = [name for name in (decode.kv_dtype, prefill.kv_dtype) if name not in formats.BYTES]
    if unknown:
        return _differ("KV dtype", decode.kv_dtype, prefill.kv_dtype)
    return ""


def _differ(field: str, decode: object, prefill: object) -> str:
    return (
        f"different models: {field} is {decode!r} on the decode node and {prefill!r} on the "
        f"prefill node; start both with the same model and options"
    )
