"""A survey of a cluster from outside: the router, every node, every pair of nodes.

It records failed RPCs instead of raising, and judges nothing (see ``findings.py``).
"""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from random import randrange
from typing import Any, TypeVar

import grpc

from ...proto import tandem_pb2 as pb
from ...proto.tandem_pb2_grpc import DecodeStub, PrefillStub, RegistryStub
from ...shared.config.limits import MAX_EXAMINED
from ...shared.security.credentials import INSECURE, Credentials, open_url

RPC_SECONDS = 3.0
# Longer than a decode node's own deadline for all of its pairs.
EXAMINE_SECONDS = 15.0
MAX_RPCS = 64
# Pairs to examine; for each the prefill node computes a prompt.
MAX_PAIRS = 2048
MAX_BODY = 1 << 16

Reply = TypeVar("Reply")


@dataclass(frozen=True, slots=True)
class RpcResult:
    """The result of one RPC; exactly one of ``reply`` and ``problem`` is set."""

    seconds: float
    reply: Any = None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class SurveyedNode:
    """A node as the router lists it, and its own status (``pb.StatusReply``)."""

    info: pb.NodeInfo
    status: RpcResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """The results of all RPCs. ``pairs`` has the examinations (``pb.ExamineReply``) by decode node,
    ``unexamined`` is the number of pairs over the limit, and ``encrypted`` says whether all RPCs
    used TLS."""

    url: str
    registry: str
    health: RpcResult
    ready: RpcResult
    listing: RpcResult
    nodes: list[SurveyedNode] = field(default_factory=list)
    pairs: dict[str, RpcResult] = field(default_factory=dict)
    unexamined: int = 0
    encrypted: bool = False
    timestamp: float = field(default_factory=time.time)  # Unix time

    def reports(self) -> Iterator[tuple[str, pb.PairReport]]:
        """The report of each examined pair, with the decode node's name."""
        for decode, result in self.pairs.items():
            for pair in result.reply.pairs if result.reply is not None else ():
                yield decode, pair


def survey(url: str, registry: str, credentials: Credentials = INSECURE) -> Survey:
    """Query the router at ``url`` and ``registry``, then all of its nodes in parallel."""
    health, ready = _get(f"{url}/live"), _get(f"{url}/ready")
    listing = _rpc(
        credentials, registry, RegistryStub, lambda s: s.List(pb.ListRequest(), **_LIMIT)
    )
    infos = list(listing.reply.nodes) if listing.reply is not None else []
    with ThreadPoolExecutor(MAX_RPCS) as pool:
        nodes = list(pool.map(lambda info: _query(credentials, info), infos))
        prefill = [node for node in nodes if node.info.role == pb.ROLE_PREFILL]
        decode = [node for node in nodes if node.info.role == pb.ROLE_DECODE]
        replying = [node for node in decode if node.status.reply is not None]
        plan = plan_pairs(len(replying), len(prefill), randrange(1 << 16))
        examined = pool.map(
            lambda decode, indices: _examine(
                credentials, decode.info, [prefill[i] for i in indices]
            ),
            replying,
            plan,
        )
        pairs = dict(zip((node.info.node_id for node in replying), examined, strict=False))
    return Survey(
        url=url,
        registry=registry,
        health=health,
        ready=ready,
        listing=listing,
        nodes=nodes,
        pairs=pairs,
        unexamined=len(replying) * len(prefill) - sum(map(len, plan)),
        encrypted=credentials.encrypted,
    )


def plan_pairs(decode: int, prefill: int, turn: int) -> list[list[int]]:
    """The indices of the prefill nodes that each decode node examines.

    These are all prefill nodes, unless there are too many pairs. Then each decode node gets the
    same number of them, in rotation from an index that ``turn`` varies between surveys.
    """
    if not prefill:
        return []
    each = min(prefill, MAX_EXAMINED, max(1, MAX_PAIRS // max(1, decode)))
    served = decode if each > 1 else min(decode, MAX_PAIRS)
    return [
        [(turn + number * each + step) % prefill for step in range(each)]
        for number in range(served)
    ]


def _query(credentials: Credentials, info: pb.NodeInfo) -> SurveyedNode:
    kind = PrefillStub if info.role == pb.ROLE_PREFILL else DecodeStub
    status = _rpc(credentials, info.address, kind, lambda s: s.Status(pb.StatusRequest(), **_LIMIT))
    return SurveyedNode(info, status)


def _examine(
    credentials: Credentials, decode: pb.NodeInfo, prefill: list[SurveyedNode]
) -> RpcResult:
    request = pb.ExamineRequest(
        prefill=[
            pb.PrefillCandidate(
                node_id=node.info.node_id, epoch=node.info.epoch, address=node.info.address
            )
            for node in prefill
        ]
    )
    return _rpc(
        credentials,
        decode.address,
        DecodeStub,
        lambda stub: stub.Examine(request, timeout=EXAMINE_SECONDS),
    )


# Options of each RPC: a timeout, without waiting for an absent server.
_LIMIT: dict[str, Any] = {"timeout": RPC_SECONDS}


def _rpc(
    credentials: Credentials,
    address: str,
    kind: Callable[[grpc.Channel], Any],
    send: Callable[[Any], Any],
) -> RpcResult:
    start = time.monotonic()
    with credentials.blocking_channel(address) as channel:
        try:
            reply = send(credentials.stub(kind, channel))
        except grpc.RpcError as error:
            details = credentials.explain(error).partition(";")[0]
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                details = f"no answer within {time.monotonic() - start:.0f} s"
            problem = details or error.code().name
            return RpcResult(time.monotonic() - start, problem=problem)
    return RpcResult(time.monotonic() - start, reply)


def _get(url: str) -> RpcResult:
    """The JSON of a GET request; an error status is a problem."""
    start = time.monotonic()
    try:
        with open_url(url, RPC_SECONDS) as response:
            reply = json.loads(response.read(MAX_BODY))
    except urllib.error.HTTPError as error:
        with error:
            return RpcResult(time.monotonic() - start, problem=_message(error))
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        return RpcResult(time.monotonic() - start, problem=str(reason))
    return RpcResult(time.monotonic() - start, reply)


def _message(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.loads(error.read(MAX_BODY))["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP {error.code}"
