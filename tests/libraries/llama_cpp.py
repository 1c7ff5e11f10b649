"""Records how Tandem reads llama.cpp's own files, from a folder of its source:

    python -m tandem.tests.libraries.llama_cpp FOLDER

Runs the tests of GGUF files that need the folder, and writes a table of what they tried.
"""

from __future__ import annotations

import argparse
import os
import re
import textwrap
from pathlib import Path

import pytest

from .records import RECORDS

TESTS = Path(__file__).parents[1] / "shared" / "weights" / "gguf"
VOCABULARIES = f"{TESTS / 'test_tokenizers.py'}::test_texts_of_llama_cpp_are_its_tokens"
MODELS = f"{TESTS / 'test_converter.py'}::test_a_converted_model_is_the_one_of_its_folder"


class Reports:
    """A plugin of pytest: the reports of tests by function and parameter."""

    def __init__(self) -> None:
        self.by_function: dict[str, dict[str, pytest.TestReport]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            function, _, parameter = report.nodeid.rstrip("]").rpartition("[")
            self.by_function.setdefault(function.rpartition("::")[2], {})[parameter] = report


def version_of(source: Path) -> str:
    """The version that the source names, and the distribution that it is of, if it is of one."""
    lines = (source / "CMakeLists.txt").read_text()
    numbers = re.findall(r"LLAMA_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)", lines)
    outer = source.parents[1].name
    return ".".join(numbers) + (f" of {outer}" if outer.startswith("llama_cpp_python-") else "")


def table(reports: Reports, version: str) -> str:
    """Markdown: the vocabularies, and the models that were converted."""
    vocabularies, models = (
        reports.by_function[tests.rpartition("::")[2]] for tests in (VOCABULARIES, MODELS)
    )
    lines = [
        *(f"# Files of llama.cpp {version}", ""),
        "Texts of its vocabularies, and how many have the tokens that it says. Of those without",
        "tokens, a text is encoded and decoded again.",
        *("", "| vocabulary | texts | equal | test |", "|---|---|---|---|"),
    ]
    for name, report in vocabularies.items():
        counts = dict(report.user_properties)
        texts, equal = counts.get("texts", "no tokens"), counts.get("equal", "")
        lines.append(f"| {name} | {texts} | {equal} | {report.outcome} |")
    passed = [name for name, report in models.items() if report.passed]
    lines += [
        *("", f"Of {len(models)} tiny checkpoints that its converter has converted, {len(passed)}"),
        "have the spec of their folder and the logits of transformers:",
        *textwrap.wrap(", ".join(passed), 100, break_on_hyphens=False),
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Write the table. The status is that of the tests."""
    parser = argparse.ArgumentParser(prog="python -m tandem.tests.libraries.llama_cpp")
    parser.add_argument("source", type=lambda folder: Path(folder).resolve())
    source = parser.parse_args().source
    os.environ["LLAMA_CPP"] = str(source)
    reports = Reports()
    status = pytest.main(["-q", "-n", "0", VOCABULARIES, MODELS], [reports])
    if reports.by_function:
        (RECORDS / "llama_cpp.md").write_text(table(reports, version_of(source)))
    return int(status)


if __name__ == "__main__":
    raise SystemExit(main())
