"""The record of a suite's run: a table of the failed cases with their known reasons.

Reasons are listed in ``known_failures/NAME.toml``, by patterns of cases.
"""

from __future__ import annotations

import fnmatch
import tomllib
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from tandem.benchmarks.support.report import RESULTS, machine

KNOWN = Path(__file__).parent / "known_failures"
RECORDS = RESULTS / "contracts"
FAILED, SKIPPED, HELD = "fails", "does not apply", "holds"
UNEXPLAINED = "not explained"
SHOWN = 160  # characters of a failure's message


@dataclass(frozen=True)
class ReportedCase:
    """One test of a suite, with its message if it fails."""

    name: str
    outcome: str
    message: str = ""


def read_report(path: Path) -> list[ReportedCase]:
    """The cases of a report in JUnit's format."""
    return [_case(element) for element in ElementTree.parse(path).iter("testcase")]


def _case(element: ElementTree.Element) -> ReportedCase:
    name = "::".join(filter(None, (element.get("classname"), element.get("name"))))
    for tag, outcome in (("failure", FAILED), ("error", FAILED), ("skipped", SKIPPED)):
        if (child := element.find(tag)) is not None:
            return ReportedCase(name, outcome, child.get("message") or child.text or "")
    return ReportedCase(name, HELD)


class KnownFailures:
    """Known reasons for failures, by patterns of ``NAME`` or ``NAME: MESSAGE``; the first match
    counts."""

    def __init__(self, reasons: dict[str, str]) -> None:
        self._reasons = reasons

    @classmethod
    def of(cls, suite: str) -> KnownFailures:
        path = KNOWN / f"{suite}.toml"
        return cls(tomllib.loads(path.read_text()) if path.exists() else {})

    def reason(self, case: ReportedCase) -> str | None:
        names = (case.name, f"{case.name}: {case.message}")
        fitting = (
            why for cases, why in self._reasons.items() if any(_fits(name, cases) for name in names)
        )
        return next(fitting, None)


def _fits(name: str, pattern: str) -> bool:
    """Match a pattern with ``*``; brackets are literal, because names of cases contain them."""
    return fnmatch.fnmatchcase(name, pattern.replace("[", "[[]"))


def text(suite: str, cases: Sequence[ReportedCase], failures: KnownFailures) -> str:
    """The record of a run, as Markdown."""
    counts = Counter(case.outcome for case in cases)
    summary = f"{counts[HELD]} of {len(cases)} hold, {counts[SKIPPED]} do not apply"
    lines = [
        f"# {suite}\n",
        f"{summary}, {counts[FAILED]} fail (`python -m tandem.contracts {suite}`, "
        f"{datetime.now(UTC):%Y-%m-%d}, {machine()}).",
    ]
    failed = [case for case in cases if case.outcome == FAILED]
    if failed:
        lines += ["\n| fails | why |", "|---|---|"]
    for case in failed:
        why = failures.reason(case) or f"{UNEXPLAINED}: {case.message[:SHOWN]}"
        lines.append(f"| `{_cell(case.name)}` | {_cell(why)} |")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def unexplained(cases: Sequence[ReportedCase], failures: KnownFailures) -> list[ReportedCase]:
    """The failed cases without a known reason."""
    return [case for case in cases if case.outcome == FAILED and failures.reason(case) is None]
