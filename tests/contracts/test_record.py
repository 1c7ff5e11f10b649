from __future__ import annotations

from pathlib import Path

import pytest

from tandem.contracts.record import (
    FAILED,
    HELD,
    SKIPPED,
    KnownFailures,
    ReportedCase,
    read_report,
    text,
    unexplained,
)
from tandem.contracts.suites import SERVERS, SUITES

REPORT = """<testsuites><testsuite>
<testcase classname="a" name="holds"/>
<testcase classname="a" name="fails[x|y]"><failure message="1 == 2">trace</failure></testcase>
<testcase name="breaks"><error message="no fixture"/></testcase>
<testcase classname="a" name="skipped"><skipped message="no images"/></testcase>
</testsuite></testsuites>"""


@pytest.fixture
def cases(tmp_path: Path) -> list[ReportedCase]:
    path = tmp_path / "report.xml"
    path.write_text(REPORT)
    return read_report(path)


def test_cases_are_read_from_a_report(cases: list[ReportedCase]) -> None:
    assert [(case.name, case.outcome) for case in cases] == [
        ("a::holds", HELD),
        ("a::fails[x|y]", FAILED),
        ("breaks", FAILED),
        ("a::skipped", SKIPPED),
    ]


def test_a_record_has_each_failure_with_its_reason(cases: list[ReportedCase]) -> None:
    failures = KnownFailures({"*::fails[x|*": "the model is small"})
    report = text("openai", cases, failures)
    assert "1 of 4 hold, 1 do not apply, 2 fail" in report
    assert "| `a::fails[x\\|y]` | the model is small |" in report
    assert "| `breaks` | not explained: no fixture |" in report
    assert [case.name for case in unexplained(cases, failures)] == ["breaks"]


def test_a_reason_may_be_for_one_message() -> None:
    failures = KnownFailures({"a: too slow": "the machine"})
    assert failures.reason(ReportedCase("a", FAILED, "too slow")) == "the machine"
    assert failures.reason(ReportedCase("a", FAILED, "too slow, wrong")) is None


@pytest.mark.parametrize("name", SUITES)
def test_suites_ask_servers_that_exist_and_have_readable_reasons(name: str) -> None:
    assert SUITES[name].server in SERVERS
    assert all(KnownFailures.of(name)._reasons.values())
