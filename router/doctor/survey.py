"""A survey of a cluster from outside: the router, every node, every pair of nodes.

It judges nothing (see ``findings.py``), and records failed RPCs instead of raising.
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
# Pairs of nodes to examine, each with a prompt that the prefill node computes.
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
    """The results of all RPCs. ``pairs`` has the examinations (``pb.ExamineReply``) by decode
    node; ``unexamined`` is the number of pairs over the limit; ``encrypted``: all RPCs used
    TLS."""

    url: str
    registry: str
    health: RpcResult
    ready: RpcResult
    listed: RpcResult
    nodes: list[SurveyedNode] = field(default_factory=list)
    pairs: dict[str, RpcResult] = field(default_factory=dict)
    unexamined: int = 0
    encrypted: bool = False
    asked_at: float = field(default_factory=time.time)  # Unix time

    def reports(self) -> Iterator[tuple[str, pb.PairReport]]:
        """The report of every examined pair, with the decode node's name."""
        for decode, answer in self.pairs.items():
            for pair in answer.reply.pairs if answer.reply is not None else ():
                yield decode, pair


def survey(url: str, registry: str, credentials: Credentials = INSECURE) -> Survey:
    """Call the router at ``url`` and ``registry``, then all of its nodes in parallel."""
    health, ready = _get(f"{url}/live"), _get(f"{url}/ready")
    listed = _rpc(credentials, registry, RegistryStub, lambda s: s.List(pb.ListRequest(), **_LIMIT))
    infos = list(listed.reply.nodes) if listed.reply is not None else []
    with ThreadPoolExecutor(MAX_RPCS) as pool:
        nodes = list(pool.map(lambda info: _see(credentials, info), infos))
        prefill = [seen for seen in nodes if seen.info.role == pb.ROLE_PREFILL]
        decode = [seen for seen in nodes if seen.info.role == pb.ROLE_DECODE]
        answering = [seen for seen in decode if seen.status.reply is not None]
        plan = plan_pairs(len(answering), len(prefill), randrange(1 << 16))
        examined = pool.map(
            lambda decode, chosen: _examine(
                credentials, decode.info, [prefill[at] for at in chosen]
            ),
            answering,
            plan,
        )
        pairs = dict(zip((seen.info.node_id for seen in answering), examined, strict=False))
    return Survey(
        url=url,
        registry=registry,
        health=health,
        ready=ready,
        listed=listed,
        nodes=nodes,
        pairs=pairs,
        unexamined=len(answering) * len(prefill) - sum(map(len, plan)),
        encrypted=credentials.encrypted,
    )


def plan_pairs(decode: int, prefill: int, turn: int) -> list[list[int]]:
    """The indices of the prefill nodes that each decode node examines.

    All of them, unless there are too many pairs. Then all decode nodes get the same number of
    prefill nodes, in turn, starting at an index that ``turn`` varies between surveys.
    """
    if not prefill:
        return []
    each = min(prefill, MAX_EXAMINED, max(1, MAX_PAIRS // max(1, decode)))
    served = decode if each > 1 else min(decode, MAX_PAIRS)
    return [
        [(turn + number * each + step) % prefill for step in range(each)]
        for number in range(served)
    ]


def _see(credentials: Credentials, info: pb.NodeInfo) -> SurveyedNode:
    kind = PrefillStub if info.role == pb.ROLE_PREFILL else DecodeStub
    status = _rpc(credentials, info.address, kind, lambda s: s.Status(pb.StatusRequest(), **_LIMIT))
    return SurveyedNode(info, status)


def _examine(
    credentials: Credentials, decode: pb.NodeInfo, prefill: list[SurveyedNode]
) -> RpcResult:
    request = pb.ExamineRequest(
        prefill=[
            pb.PrefillCandidate(
                node_id=seen.info.node_id, epoch=seen.info.epoch, address=seen.info.address
            )
            for seen in prefill
        ]
    )
    ask = lambda stub: stub.Examine(request, timeout=EXAMINE_SECONDS)  # noqa: E731
    return _rpc(credentials, decode.address, DecodeStub, ask)


# Options of each RPC: a timeout, and no waiting for a server that is not there.
_LIMIT: dict[str, Any] = {"timeout": RPC_SECONDS}


def _rpc(
    credentials: Credentials,
    address: str,
    kind: Callable[[grpc.Channel], Any],
    ask: Callable[[Any], Any],
) -> RpcResult:
    begun = time.monotonic()
    with credentials.blocking_channel(address) as channel:
        try:
            reply = ask(credentials.stub(kind, channel))
        except grpc.RpcError as error:
            details = credentials.explain(error).partition(";")[0]
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                details = f"no answer within {time.monotonic() - begun:.0f} s"
            problem = details or error.code().name
            return RpcResult(time.monotonic() - begun, problem=problem)
    return RpcResult(time.monotonic() - begun, reply)


def _get(url: str) -> RpcResult:
    """The JSON of a probe; an error status is a problem."""
    begun = time.monotonic()
    try:
        with open_url(url, RPC_SECONDS) as answer:
            reply = json.loads(answer.read(MAX_BODY))
    except urllib.error.HTTPError as error:
        with error:
            return RpcResult(time.monotonic() - begun, problem=_message(error))
    except (OSError, http.client.HTTPException, ValueError) as error:
        why = getattr(error, "reason", error)
        return RpcResult(time.monotonic() - begun, problem=str(why))
    return RpcResult(time.monotonic() - begun, reply)


def _message(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.loads(error.read(MAX_BODY))["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP {error.code}"
