"""Published clients, testers and tests of other servers against Tandem, each in a virtual
environment of its own:

    python -m tandem.contracts NAME [--url URL --key KEY] [--record]

A name is one of ``SUITES``. The first run creates the environment with the suite's packages in the
user's cache folder. ``--url`` selects a running server instead of starting one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

from tandem.shared.version import version

from . import record
from .environments import environment
from .servers import command_of, served
from .suites import KEY, OTHERS, SCRIPTS, SERVERS, SUITES


def main() -> int:
    """Run one suite; the status is 1 if a case fails without a known reason."""
    parser = argparse.ArgumentParser(prog="python -m tandem.contracts")
    parser.add_argument("name", choices=sorted(SUITES))
    parser.add_argument("--url", help="a running server (default: one is started)")
    parser.add_argument("--key", default=KEY)
    parser.add_argument("--record", action="store_true", help="keep the result in the repository")
    options = parser.parse_args()
    folder = environment(options.name, SUITES[options.name])
    report = folder / "report.xml"
    report.unlink(missing_ok=True)
    server = SERVERS[SUITES[options.name].server]
    with contextlib.ExitStack() as stack:
        url = options.url or stack.enter_context(served(server, options.key, folder))
        status = _run(options.name, folder, url.rstrip("/"), options.key, report)
    if not report.exists():
        print(f"{options.name} ended with status {status} and no report", file=sys.stderr)
        return status or 1
    return _judge(options.name, record.read_report(report), keep=options.record)


def _run(name: str, folder: Path, url: str, key: str, report: Path) -> int:
    """Run the suite's command and return its status."""
    suite = SUITES[name]
    server = SERVERS[suite.server]
    model = server.model
    filled = {"url": url, "key": key, "model": model, "scripts": SCRIPTS, "folder": folder}
    program, *arguments = (part.format(**filled, report=report) for part in suite.command)
    environment = {
        "TARGET_URL": url,
        "TARGET_KEY": key,
        "TARGET_MODEL": model,
        "TARGET_VERSION": version(),
        "TARGET_COMMAND": json.dumps(command_of(server, key, folder)),
        "TARGET_NODE_MODULES": str(folder / "node_modules"),
        "TARGET_OTHERS": str(folder / OTHERS),
        "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(SCRIPTS),
    }
    command = [str(folder / "bin" / program), *arguments]
    return subprocess.run(command, cwd=folder, env=os.environ | environment).returncode


def _judge(name: str, cases: list[record.ReportedCase], *, keep: bool) -> int:
    """Print the record of a run, write it with ``--record``, and return the status."""
    failures = record.KnownFailures.of(name)
    record_text = record.text(name, cases, failures)
    print(record_text)
    if keep:
        record.RECORDS.mkdir(exist_ok=True)
        (record.RECORDS / f"{name}.md").write_text(record_text)
    return int(bool(record.unexplained(cases, failures)))


if __name__ == "__main__":
    sys.exit(main())
