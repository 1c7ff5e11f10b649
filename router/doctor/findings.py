"""Findings: the problems of a cluster and their remedies, as a pure function of a survey."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ...proto import tandem_pb2 as pb
from ...proto.roles import role_name
from ...shared.causes import Cause
from ...shared.handoff.carriers.tcp import NAME as TCP
from ...shared.host_port import is_loopback, split_host_port
from ...shared.process.open_files import REMEDY
from ...shared.telemetry.prefill_origin import LOCAL, REMOTE, LocalReason, known_reason
from ...shared.telemetry.process_metrics import DAY, EXPIRY, SOON_SECONDS
from ...shared.telemetry.prompt_metrics import PROMPTS, RECENT, RECENT_SECONDS
from ...shared.unix_sockets import UNIX
from ..cluster.admin import describe_absence
from .survey import Survey, SurveyedNode

# Reasons for local prefill in a healthy cluster.
NEVER_REMOTE = {
    LocalReason.SHORT,
    LocalReason.NOTHING_MISSING,
    LocalReason.PROMPT_LOGPROBS,
    LocalReason.POOLING,
    LocalReason.PREEMPTED,
}
# Reasons by choice; with any other reason a decode node tried to receive KV and failed.
CHOSEN = {LocalReason.FASTER_HERE, LocalReason.TOO_LATE_THERE, LocalReason.NO_NODE}
# Fewer prompts prove nothing.
MIN_PROMPTS = 5
# A heartbeat is late after this many periods, and the period of a router that does not report it.
LATE_HEARTBEATS = 2.0
USUAL_SECONDS = 1.0
# Fractions of the open-file limit from which there is a note, and a problem.
FULL, VERY_FULL = 0.8, 0.95
OPEN_FILES, MAX_OPEN_FILES = "process_open_fds", "process_max_fds"
# Further absent nodes are only counted.
MAX_ABSENT_SHOWN = 64


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem and its remedy. ``wrong``: requests fail or are slower because of it; otherwise it
    is a note."""

    subject: str
    problem: str
    remedy: str
    wrong: bool = True


def findings(survey: Survey) -> list[Finding]:
    """All findings, problems before notes."""
    all_findings = [
        *_of_router(survey),
        *_of_absent(survey),
        *_of_nodes(survey),
        *_of_models(survey.nodes),
        *_of_versions(survey),
        *_of_placement(survey),
        *_of_files(survey),
        *_of_certificates(survey),
        *_of_pairs(survey),
        *_of_unexamined(survey),
        *_of_carriers(survey),
        *_of_exposure(survey),
    ]
    return sorted(all_findings, key=lambda finding: not finding.wrong)


def _of_router(survey: Survey) -> Iterator[Finding]:
    if survey.health.problem:
        yield Finding(
            "router",
            f"does not answer at {survey.url}: {survey.health.problem}",
            "start it (tandem router), or correct the address",
        )
    if survey.listing.problem:
        yield Finding(
            "router",
            f"its registry does not answer at {survey.registry}: {survey.listing.problem}",
            "name the address of --registry-port with --router",
        )
    elif not _with_role(survey.nodes, pb.ROLE_DECODE):
        yield Finding(
            "router",
            "no decode node has joined, so every request gets 503",
            f"start one: tandem decode-node MODEL --join {survey.registry}",
        )
    else:
        if survey.ready.problem and not survey.health.problem:
            yield Finding("router", f"is not ready: {survey.ready.problem}", "see its log")
        if not _with_role(survey.nodes, pb.ROLE_PREFILL):
            yield Finding(
                "router",
                "no prefill node has joined, so decode nodes prefill every prompt",
                f"if this is not intended: tandem prefill-node MODEL --join {survey.registry}",
                wrong=False,
            )


def _of_absent(survey: Survey) -> Iterator[Finding]:
    absent = list(survey.listing.reply.absent) if survey.listing.reply is not None else []
    for node in absent[-MAX_ABSENT_SHOWN:]:
        subject = f"{role_name(node.role)} node {node.node_id}"
        if node.refused:
            remedy = (
                "correct what the reason names; if it is the model, start it with the one that the "
                "cluster serves"
            )
        elif node.failed:
            remedy = "its log says more; start it again, unless a supervisor does"
        else:
            remedy = (
                "see whether the process is stopped, dead or cut off from the router; its log says "
                "more; start it again"
            )
        if node.returned:
            remedy = "nothing, unless it happens again; the log of the start that ended says more"
        yield Finding(subject, describe_absence(node), remedy, wrong=not node.returned)
    if older := [node for node in absent[:-MAX_ABSENT_SHOWN] if not node.returned]:
        rejected = sum(node.refused for node in older)
        yield Finding(
            "nodes",
            f"{len(older)} more are absent and left out here: {len(older) - rejected} were "
            f"dropped, {rejected} rejected, all of them earlier",
            "see GET /admin/nodes of the router, which lists all",
        )


def _of_nodes(survey: Survey) -> Iterator[Finding]:
    reply = survey.listing.reply
    late_seconds = LATE_HEARTBEATS * ((reply and reply.heartbeat_seconds) or USUAL_SECONDS)
    for node in survey.nodes:
        yield from _of_node(node, late_seconds)


def _of_node(node: SurveyedNode, late_seconds: float) -> Iterator[Finding]:
    info, status = node.info, node.status.reply
    subject = f"{role_name(info.role)} node {info.node_id}"
    if info.heartbeat_age_seconds > late_seconds:
        yield Finding(
            subject,
            f"its last heartbeat is {info.heartbeat_age_seconds:.1f} s old",
            "if this persists, the process is overloaded, or the network loses its RPCs",
            wrong=False,  # a missing reply is a finding of its own
        )
    if status is None:
        yield Finding(
            subject,
            f"does not answer at {info.address}: {node.status.problem}",
            "see whether the process is stopped, and whether its --port is open from here; if it "
            "listens at another address, set --advertise",
        )
        return
    if status.epoch != info.epoch or status.node_id != info.node_id:
        yield Finding(
            subject,
            f"another process, {status.node_id}, answers at {info.address}",
            "two nodes advertise the same address; give each its own --port or --advertise",
        )
        return
    if info.unreachable:
        yield Finding(
            subject,
            info.unreachable,
            "it answers here, so look at the network between the router's machine and the node's",
        )
    yield from _of_status(subject, status)


def _of_status(subject: str, status: pb.StatusReply) -> Iterator[Finding]:
    if status.draining:
        yield Finding(
            subject, "drains: it takes no more work", "nothing, if this is intended", False
        )
    if not status.load.free_blocks:
        yield Finding(
            subject,
            f"none of its {status.load.total_blocks} KV blocks is free",
            "if this persists: raise --kv-fraction, add a node, or lower --max-num-seqs",
            wrong=False,
        )
    yield from _of_metrics(subject, status)


def _of_metrics(subject: str, status: pb.StatusReply) -> Iterator[Finding]:
    corrupt = _sum(status, "tandem_data_plane_checksum_failures_total")
    if corrupt:
        yield Finding(
            subject,
            f"{corrupt:.0f} frames of KV arrived with a wrong checksum since it started",
            "none was used, but memory or the network is faulty",
            wrong=False,
        )
    slots = _sum(status, "tandem_data_plane_staging_slots", state="held")
    if slots and not _sum(status, "tandem_data_plane_staging_slots", state="free"):
        yield Finding(
            subject,
            f"all {slots:.0f} slots of its staging ring are in use",
            "if this persists, receivers or the network are slow; raise --staging-bytes",
            wrong=False,
        )


def _of_placement(survey: Survey) -> Iterator[Finding]:
    """Find unused prefill nodes, which go unnoticed because all requests succeed: recently, or
    since the start if there are few requests."""
    if not _with_role(survey.nodes, pb.ROLE_PREFILL):
        return
    lately = f"in the last {RECENT_SECONDS / 60:.0f} minutes"
    for series, when in ((RECENT, lately), (PROMPTS, "since the decode nodes started")):
        prompts = _prompts(survey, series)
        if any(where == REMOTE for where, _ in prompts):
            return
        reasons = {
            known_reason(reason): count
            for (where, reason), count in prompts.items()
            if where == LOCAL and reason not in NEVER_REMOTE
        }
        if sum(reasons.values()) >= MIN_PROMPTS:
            yield _unused_prefill_nodes(reasons, when)
            return


def _prompts(survey: Survey, series: str) -> Counter[tuple[str, str]]:
    """The prompts of all decode nodes, by where they were prefilled and why."""
    counts: Counter[tuple[str, str]] = Counter()
    for status in (node.status.reply for node in survey.nodes if node.status.reply is not None):
        for metric in status.metrics:
            if metric.name == series and metric.value:
                counts[metric.labels["where"], metric.labels["reason"]] += int(metric.value)
    return counts


def _unused_prefill_nodes(reasons: Mapping[str, int], when: str) -> Finding:
    counts = ", ".join(f"{reason}: {count}" for reason, count in reasons.items())
    return Finding(
        "prefill nodes",
        f"received no prompt {when}, although decode nodes prefilled {sum(reasons.values())} "
        f"themselves that were long enough ({counts})",
        "see the findings about pairs, and the decode nodes' logs; if the reason is 'faster here', "
        "the prefill nodes or the links to them are too slow to be useful",
        wrong=any(reason not in CHOSEN for reason in reasons),
    )


def _of_certificates(survey: Survey) -> Iterator[Finding]:
    for node in survey.nodes:
        for metric in node.status.reply.metrics if node.status.reply is not None else ():
            remaining = metric.value - survey.timestamp
            if metric.name != EXPIRY or remaining > SOON_SECONDS:
                continue
            file = metric.labels["file"]
            ends = f"ends in {remaining / DAY:.0f} days" if remaining > 0 else "has ended"
            yield Finding(
                f"{role_name(node.info.role)} node {node.info.node_id}",
                f"the certificate of its {file} {ends}",
                "replace the file, which is read again without a restart; if it was replaced, the "
                "node's log says why it is not used",
                wrong=remaining <= 0,
            )


def _of_files(survey: Survey) -> Iterator[Finding]:
    """Find processes that are close to their limit of open files and connections."""
    reply = survey.listing.reply
    counts = {} if reply is None else {"router": (reply.open_files, reply.open_file_limit)}
    for node in survey.nodes:
        if node.status.reply is not None:
            series = {metric.name: int(metric.value) for metric in node.status.reply.metrics}
            subject = f"{role_name(node.info.role)} node {node.info.node_id}"
            counts[subject] = series.get(OPEN_FILES, 0), series.get(MAX_OPEN_FILES, 0)
    for subject, (files, limit) in counts.items():
        if files > FULL * limit:
            yield Finding(
                subject,
                f"has {files} of the {limit} files open that it may have, connections included",
                REMEDY,
                wrong=files > VERY_FULL * limit,
            )


def _of_models(nodes: list[SurveyedNode]) -> Iterator[Finding]:
    """Find nodes with different models. A router rejects such a node, but one of --pd-url may have
    been restarted with another model."""
    replying = [node for node in nodes if node.status.reply is not None]
    for node in replying[1:]:
        first = replying[0]
        if node.status.reply.model.fingerprint != first.status.reply.model.fingerprint:
            yield Finding(
                f"{role_name(node.info.role)} node {node.info.node_id}",
                f"runs another model than {first.info.node_id}",
                "start both with the same model and options",
            )


def _of_versions(survey: Survey) -> Iterator[Finding]:
    reply = survey.listing.reply
    if reply is None:
        return
    others = {node.info.node_id: node.info.version for node in survey.nodes}
    different = {name: own for name, own in others.items() if own != reply.version}
    if different:
        versions = ", ".join(f"{name} {own or 'unknown'}" for name, own in different.items())
        yield Finding(
            "versions",
            f"the router runs {reply.version}, but: {versions}",
            "finish the update; mixed versions are supported only for its duration",
            wrong=False,
        )


def _of_pairs(survey: Survey) -> Iterator[Finding]:
    """Find pairs that cannot move KV, also because one node refuses the other."""
    for decode, result in survey.pairs.items():
        if result.problem:
            yield Finding(
                f"decode node {decode}",
                f"could not be examined: {result.problem}",
                "run tandem doctor again; if this persists, see its log",
            )
            continue
        for pair in result.reply.pairs:
            if pair.problem:
                yield Finding(
                    f"{pair.node_id} to {decode}",
                    f"KV cannot move: {pair.problem}",
                    _remedy(pair),
                )


def _of_unexamined(survey: Survey) -> Iterator[Finding]:
    omitted = survey.unexamined + sum(
        result.reply.left_out for result in survey.pairs.values() if result.reply is not None
    )
    if omitted:
        examined = sum(1 for _ in survey.reports())
        yield Finding(
            "pairs",
            f"of {examined + omitted} pairs of a prefill and a decode node {examined} were "
            f"examined, and {omitted} were left out",
            "run tandem doctor again, which examines other pairs; no problem of these is known",
            wrong=False,
        )


def _of_carriers(survey: Survey) -> Iterator[Finding]:
    """Find carriers that work but are several times slower than possible, which goes unnoticed
    otherwise."""
    hosts = {node.info.node_id: _host(node.info.address) for node in survey.nodes}
    for decode, pair in survey.reports():
        if pair.carrier == TCP and hosts.get(decode) == _host(pair.address):
            yield Finding(
                f"{pair.node_id} to {decode}",
                "KV goes over TCP, although both nodes are on one host",
                "if --carrier does not ask for it: run both as the same user, with the same view "
                "of processes (in containers, one PID namespace)",
                wrong=False,
            )


def _of_exposure(survey: Survey) -> Iterator[Finding]:
    reachable = [n.info.address for n in survey.nodes if not is_loopback(_host(n.info.address))]
    if reachable and not survey.encrypted:
        yield Finding(
            "cluster",
            f"other machines can reach nodes that use no TLS: {', '.join(reachable[:4])}",
            "trust the network, or give all parts --tls-cert, --tls-key, --tls-ca and "
            "--cluster-token-file",
            wrong=False,
        )


def _host(address: str) -> str:
    return address if address.startswith(UNIX) else split_host_port(address)[0]


_REMEDIES: dict[str, str] = {
    Cause.PEER_LOST: "see whether the prefill node is stopped, and whether its --port is open from "
    "the decode node",
    Cause.TIMEOUT_GREET: "open the prefill node's data ports to the decode node (--kv-port fixes "
    "them), and see that --kv-host is an address that it can reach",
    Cause.REFUSED: "start both with the same model, options and version",
    Cause.CANARY: "start both with the same weights and version, then restart the prefill node",
    Cause.NO_BLOCKS: "the decode node is full; try again when it has free blocks",
    Cause.BUSY: "the prefill node is full or drains; try again",
    Cause.NO_PLACE: "raise --max-peers of the prefill node, or run fewer decode nodes",
}


# Causes that fit large packets being lost while small ones pass.
_STALLED = frozenset(
    {Cause.PEER_LOST, Cause.TIMEOUT_OPEN, Cause.TIMEOUT_PROGRESS, Cause.TIMEOUT_TRANSFER}
)


def _remedy(pair: pb.PairReport) -> str:
    if pair.cause in _STALLED and pair.round_trip_seconds:
        return (
            f"the prefill node answers an RPC of a few bytes in "
            f"{pair.round_trip_seconds * 1000:.0f} ms, so unless it is overloaded (see its log), "
            f"large packets are lost on the way: compare the MTU of both machines and of the "
            f"network between them (ping -M do -s 1472 HOST, from each to the other)"
        )
    return _REMEDIES.get(pair.cause, "see the logs of both nodes")


def _with_role(nodes: list[SurveyedNode], role: pb.Role) -> bool:
    return any(node.info.role == role for node in nodes)


def _sum(status: pb.StatusReply, name: str, **labels: str) -> float:
    return sum(
        metric.value
        for metric in status.metrics
        if metric.name == name and labels.items() <= metric.labels.items()
    )
