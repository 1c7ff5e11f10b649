"""The content of a log line, and the request that it belongs to."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tandem.shared.telemetry.logs import (
    LogSettings,
    RateLimitedFilter,
    add_log_context,
    checked_request_id,
    current_log_context,
    log_context,
    log_settings,
    setup_logging,
)

log = logging.getLogger("tandem.test")


@pytest.fixture(autouse=True)
def loggers_as_before() -> Iterator[None]:
    root, ours = logging.getLogger(), logging.getLogger("tandem")
    handlers, levels = root.handlers[:], (root.level, ours.level)
    yield
    root.handlers[:] = handlers
    root.setLevel(levels[0])
    ours.setLevel(levels[1])


def test_a_line_for_programs_is_one_object_whatever_is_in_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    setup_logging(LogSettings(form="json", role="decode-node", node_id="d1"))
    with (
        log_context(request_id="r1", trace_id="ab" * 16),
        log_context(transfer_id="7", attempt="2"),
    ):
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
    setup_logging(LogSettings())
    log.warning("node %s joined", "a\n12:00:00 ERROR tandem.router \x1b[2J\u2028é b")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(r"node a\n12:00:00 ERROR tandem.router \x1b[2J\u2028é b joined")


def test_a_line_for_people_ends_with_what_it_is_about(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging(LogSettings())
    log.info("nothing special")
    with log_context(request_id="r1"):
        log.info("asked")
        with log_context(transfer_id="7", attempt="1"):
            log.info("moved")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].endswith("INFO tandem.test nothing special")
    assert lines[1].endswith("asked [request r1]")
    assert lines[2].endswith("moved [request r1, transfer 7/1]")


def test_a_record_for_people_has_a_date_and_its_traceback_is_indented(
    capsys: pytest.CaptureFixture[str],
) -> None:
    setup_logging(LogSettings())
    try:
        raise ValueError("a reason\n2026-01-01 00:00:00.000 ERROR tandem.router \x1b[2J made up")
    except ValueError:
        log.exception("failed")
    first, *rest = capsys.readouterr().err.splitlines()
    assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} ERROR tandem.test failed$", first)
    assert rest and all(line.startswith("    ") and line.isprintable() for line in rest)


def test_a_level_is_of_our_own_lines(capsys: pytest.CaptureFixture[str]) -> None:
    library = logging.getLogger("library.test")
    setup_logging(LogSettings(level="debug"))
    log.debug("ours")
    library.debug("theirs")
    library.info("theirs as well")
    setup_logging(LogSettings(level="error"))
    log.warning("hushed")
    library.warning("hushed")
    log.error("told")
    words = [line.rpartition(" ")[2] for line in capsys.readouterr().err.splitlines()]
    assert words == ["ours", "well", "told"]


def test_ranks_log_with_the_settings_of_their_head(capsys: pytest.CaptureFixture[str]) -> None:
    head = LogSettings(form="json", level="warning", role="decode-node", node_id="d1")
    setup_logging(head)
    assert log_settings() == head
    setup_logging(replace(log_settings(), rank="3"))
    log.info("hushed")
    log.warning("not pinned")
    (line,) = map(json.loads, capsys.readouterr().err.splitlines())
    assert (line["message"], line["node_id"], line["rank"]) == ("not pinned", "d1", "3")
    setup_logging(LogSettings(node_id="d1", rank="3"))
    log.warning("not pinned")
    assert capsys.readouterr().err.endswith("not pinned [d1 rank 3]\n")


async def test_tasks_inherit_their_log_context_and_do_not_mix_them() -> None:
    async def serve(name: str) -> str:
        add_log_context(request_id=name)
        await asyncio.sleep(0)
        return await asyncio.create_task(inner())

    async def inner() -> str:
        return current_log_context().request_id

    assert await asyncio.gather(serve("a"), serve("b")) == ["a", "b"]
    assert current_log_context().request_id == ""


@pytest.mark.parametrize("text", ["", "a b", 'a"b', "a\nb", "ü", "x" * 129, "-x", "{}"])
def test_an_invalid_id_is_ignored(text: str) -> None:
    assert checked_request_id(text) == ""


def test_ids_that_others_use_are_kept() -> None:
    for text in ("req_011CSHoEe", "550e8400-e29b-41d4-a716-446655440000", "Root=1-67891233-abc"):
        assert checked_request_id(text) == text


def test_of_warnings_that_come_all_the_time_few_lines_are_left(
    caplog: pytest.LogCaptureFixture,
) -> None:
    times = iter((0.0, 1.0, 9.0, 11.0, 12.0, 13.0))
    log = logging.getLogger("tandem.test.seldom")
    seldom = RateLimitedFilter(lambda: next(times))
    log.addFilter(seldom)
    try:
        for _ in range(5):
            log.warning("refused %s", "a")
            log.error("always")
        log.warning("of another kind")
    finally:
        log.removeFilter(seldom)
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warnings == ["refused a", "refused a (2 more suppressed)", "of another kind"]
    assert len(caplog.records) == len(warnings) + 5
