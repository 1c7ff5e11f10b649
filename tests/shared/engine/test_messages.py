"""Messages between head and ranks: every type survives the way there, and nothing else does."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.proto.packed_logprobs import pack_logprobs
from tandem.shared.engine.channel import PREFIX_BYTES, body_length, framed
from tandem.shared.engine.messages import (
    CODEC,
    MAX_MESSAGE_BYTES,
    AllocateCache,
    CacheAllocated,
    DataPlaneSettings,
    DeviceOpened,
    ExecuteStep,
    Failed,
    HeadEnds,
    HostAccepted,
    HostJoins,
    HostRefused,
    HostStops,
    JoinHead,
    JoinSecrets,
    KillRank,
    KVSending,
    LoadFormats,
    LoadModel,
    ModelLoaded,
    OpenDevice,
    Ping,
    Pong,
    RankEnded,
    RankEndpoints,
    RankJoins,
    RankMessage,
    RankSettings,
    StepDone,
)
from tandem.shared.engine.plan import (
    PLACEHOLDER,
    PooledRow,
    PositionLogprobs,
    RankSampling,
    SamplerSpec,
    SequenceStep,
    SlotLimits,
    StepFailure,
    StepLimits,
    StepPlan,
    StepResult,
    TokenMasks,
)
from tandem.shared.handoff.plane.messages import Cancelled, Command, Event
from tandem.shared.handoff.wire.codec import CodecError
from tandem.shared.kv.planning import RankDevice, RankMemory
from tandem.shared.telemetry.logs import LogSettings
from tandem.tests.support.step_rows import rows_of

PLANE = DataPlaneSettings(
    node_id="d",
    epoch=1 << 62,
    host=None,
    port=0,
    staging_bytes=1 << 26,
    carrier="auto",
    curve=True,
    max_peers=9,
)
SETTINGS = RankSettings(
    model_path="/models/a",
    device="auto",
    ignored_config_keys=("a", "b"),
    hf_overrides='{"a": 1}',
    data_plane=PLANE,
    log=LogSettings(rank="1"),
)
SAMPLING = RankSampling(temperature=0, logit_bias={3: -1.5, 4: 2.0}, logprobs=2)
PLAN = StepPlan.of(
    9,
    [
        SequenceStep(1, [5], 31, [4, 2], True),
        SequenceStep(2, [6, 7, 8], 0, [1], False, 2, (7, 8)),
    ],
    [SamplerSpec(1, SAMPLING, (1 << 64) - 1, [1, 2], [3], [0], 4)],
    [11, 12],
)
LOGPROBS = PositionLogprobs(5, -0.5, 1, pack_logprobs([(5, -0.5), (6, -1.25)]))
RESULT = StepResult(
    9, {1: [5, 6], 4: [7]}, {1: [LOGPROBS] * 2}, {2: [LOGPROBS]}, {3: "broken"}, 0.25
)
SECRETS = JoinSecrets(tokens=("a", "b"), certificate=b"PEM", key=b"\xff\0", name="tandem")
HOST = HostJoins(
    node_rank=1,
    nnodes=2,
    size=4,
    versions="Tandem 1 with torch 2",
    fingerprint={"layers": "4"},
    address="10.0.0.8",
    model_path="/models/a",
    device="cuda",
    devices=(0, 1),
    threads=4,
)
MESSAGES: tuple[RankMessage, ...] = (
    OpenDevice(SETTINGS),
    OpenDevice(replace(SETTINGS, data_plane=None)),
    LoadModel(LoadFormats("bfloat16", "float8_e4m3fn"), StepLimits(8192, 264, 1 << 20)),
    AllocateCache(1000, SlotLimits(64, 2048)),
    ExecuteStep(PLAN, [KVSending(2, (1 << 63) - 1, 0)]),
    TokenMasks(7, {2: b"\x00\xff", 3: b""}),
    Ping(),
    DeviceOpened(RankDevice("cpu", "a CPU", 1 << 40, 1 << 39)),
    ModelLoaded(RankMemory(1 << 39, 1 << 30, 4096)),
    CacheAllocated(RankEndpoints("tcp://a:1", "tcp://a:2", "key")),
    CacheAllocated(None),
    StepDone(RESULT, None, 4, 4),
    StepDone(None, StepFailure("computation", "IndexError"), 4, 3),
    Pong(77),
    Failed("startup", "no device"),
    JoinHead("10.0.0.7", 29501, SECRETS, 1),
    RankJoins(1),
    HOST,
    replace(HOST, devices=()),
    HostAccepted(),
    HostRefused("another model"),
    HostStops(),
    KillRank(3),
    RankEnded(3, -9),
    HeadEnds(""),
)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_arrives_as_it_was_sent(message: RankMessage) -> None:
    data = framed(message)
    assert body_length(data[:PREFIX_BYTES]) == len(data) - PREFIX_BYTES
    assert CODEC.decode(data[PREFIX_BYTES:]) == message


def test_secrets_are_not_printed() -> None:
    assert "PEM" not in repr(SECRETS) and "'a'" not in repr(JoinHead("h", 1, SECRETS, 1))


def test_every_type_of_the_engine_is_tried_here() -> None:
    plane = {*get_args(Command), *get_args(Event)}
    assert {type(message) for message in MESSAGES} == set(CODEC.kinds) - plane


@given(st.one_of([st.from_type(kind) for kind in (*get_args(Command), *get_args(Event))]))
def test_every_command_and_event_of_a_data_plane_arrives_as_it_was_sent(
    message: RankMessage,
) -> None:
    try:
        data = CODEC.encode(message)
    except (OverflowError, UnicodeEncodeError):
        return  # numbers beyond 64 bits and lone surrogates have no place on the wire
    again = CODEC.decode(data)
    assert type(again) is type(message)
    assert CODEC.encode(again) == data


NUMBER = st.integers(0, 9)
FEW = st.lists(NUMBER, max_size=2)
DECODES = st.builds(
    lambda key, start: SequenceStep(key, [PLACEHOLDER], start, [], True), NUMBER, NUMBER
)
ROWS = st.builds(
    SequenceStep,
    NUMBER,
    st.lists(NUMBER, min_size=1, max_size=2),
    NUMBER,
    FEW,
    st.booleans(),
    st.none() | NUMBER,
    FEW.map(tuple),
    st.booleans(),
    st.none() | st.builds(PooledRow, st.sampled_from(["sum", None]), second_text=NUMBER),
    NUMBER,
).map(
    lambda row: row._replace(
        prompt_targets=() if row.prompt_logprobs is None else row.prompt_targets,
        first_block=row.first_block if row.blocks else 0,
    )
)


@pytest.mark.parametrize("kinds", [DECODES, DECODES | ROWS])
@given(data=st.data())
def test_rows_arrive_as_they_were_planned(
    kinds: st.SearchStrategy[SequenceStep], data: st.DataObject
) -> None:
    rows = data.draw(st.lists(kinds, max_size=4, unique_by=lambda row: row.sequence_id))
    message = CODEC.decode(CODEC.encode(ExecuteStep(StepPlan.of(1, rows), [])))
    assert isinstance(message, ExecuteStep)
    columns = message.plan.columns
    assert rows_of(message.plan) == rows and len(columns) == len(rows)
    assert columns.only_decode == all(
        row.sample and len(row.tokens) == 1 and row.prompt_logprobs is None for row in rows
    )


@given(st.binary(max_size=100))
def test_garbage_is_refused(garbage: bytes) -> None:
    with pytest.raises(CodecError):
        CODEC.decode(garbage)


def test_a_side_that_does_not_exist_is_refused() -> None:
    data = CODEC.encode(Cancelled(transfer_id=1, attempt=1, side="send"))
    with pytest.raises(CodecError, match="side"):
        CODEC.decode(data.replace(b"send", b"sent"))


@pytest.mark.parametrize("block", [0.5, "1", None])
def test_blocks_that_no_table_can_have_are_refused(block: Any) -> None:
    data = CODEC.encode(ExecuteStep(StepPlan.of(1, [SequenceStep(1, [5], 0, [block], True)]), []))
    with pytest.raises(CodecError, match=r"columns.blocks\[...\]\[1\]\[0\]"):
        CODEC.decode(data)


def test_a_frame_over_the_limit_is_not_read() -> None:
    with pytest.raises(ValueError, match="over the limit"):
        body_length(struct.pack("<I", MAX_MESSAGE_BYTES + 1))
