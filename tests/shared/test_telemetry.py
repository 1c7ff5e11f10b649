"""What a line of the log says, and whom it says it about."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator

import pytest

from tandem.shared.telemetry import (
    Seldom,
    checked_request_id,
    setup_logging,
    subject,
    within,
    working_on,
)

log = logging.getLogger("tandem.test")


@pytest.fixture(autouse=True)
def loggers_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def test_a_line_for_programs_is_one_object_whatever_is_in_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    setup_logging("json", role="decode-node", node_id="d1")
    with within(request_id="r1", trace_id="ab" * 16), within(transfer_id="7", attempt="2"):
        try:
            raise ValueError('a "quoted"\nreason')
        except ValueError:
            log.exception("line one\nline two: %s", "é")
    log.info("alone")
    first, second = (json.loads(line) for line in capsys.readouterr().err.splitlines())
    assert first["message"] == "line one\nline two: é"
    assert "Traceback" in first["exception"] and '"quoted"' in first["exception"]
    assert (first["request_id"], first["transfer_id"], first["attempt"]) == ("r1", "7", "2")
    assert first["trace_id"] == "ab" * 16
    for line in (first, second):
        assert (line["role"], line["node_id"], line["logger"]) == (
            "decode-node",
            "d1",
            "tandem.test",
        )
        assert line["time"].endswith("+00:00")
    assert (first["level"], second["level"]) == ("error", "info")
    assert "request_id" not in second and "exception" not in second


def test_a_line_for_people_is_one_line_whatever_is_in_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    setup_logging()
    log.warning("node %s joined", "a\n12:00:00 ERROR tandem.router \x1b[2J\u2028é b")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(r"node a\n12:00:00 ERROR tandem.router \x1b[2J\u2028é b joined")


def test_a_line_for_people_ends_with_what_it_is_about(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging()
    log.info("nothing special")
    with within(request_id="r1"):
        log.info("asked")
        with within(transfer_id="7", attempt="1"):
            log.info("moved")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].endswith("INFO tandem.test nothing special")
    assert lines[1].endswith("asked [request r1]")
    assert lines[2].endswith("moved [request r1, transfer 7/1]")


async def test_tasks_work_for_whom_they_were_started_and_do_not_mix() -> None:
    async def serve(name: str) -> str:
        working_on(request_id=name)
        await asyncio.sleep(0)
        return await asyncio.create_task(inner())

    async def inner() -> str:
        return subject().request_id

    assert await asyncio.gather(serve("a"), serve("b")) == ["a", "b"]
    assert subject().request_id == ""


@pytest.mark.parametrize("given", ["", "a b", 'a"b', "a\nb", "ü", "x" * 129, "-x", "{}"])
def test_what_cannot_be_an_id_is_none(given: str) -> None:
    assert checked_request_id(given) == ""


def test_ids_that_others_use_are_kept() -> None:
    for given in ("req_011CSHoEe", "550e8400-e29b-41d4-a716-446655440000", "Root=1-67891233-abc"):
        assert checked_request_id(given) == given


def test_of_warnings_that_come_all_the_time_few_lines_are_left(caplog) -> None:
    times = iter((0.0, 1.0, 9.0, 11.0, 12.0, 13.0))
    log = logging.getLogger("tandem.test.seldom")
    seldom = Seldom(lambda: next(times))
    log.addFilter(seldom)
    try:
        for _ in range(5):
            log.warning("refused %s", "a")
            log.error("always")
        log.warning("of another kind")
    finally:
        log.removeFilter(seldom)
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert told == ["refused a", "refused a (2 more were left out)", "of another kind"]
    assert len(caplog.records) == len(told) + 5
