"""Runs parts in one network namespace and asks them; reads what to run from standard input.

It stands in for a kubelet in ``test_running.py``, and imports nothing but the standard library.
"""

import json
import os
import subprocess
import sys
import time
import urllib.request
from typing import Any

SECONDS = 100


def main() -> None:
    task = json.load(sys.stdin)
    processes = []
    for name, part in task["parts"].items():
        log = open(f"/tmp/{name}.log", "w")  # noqa: SIM115 - the part's, until all end
        command = [sys.executable, "-m", "tandem", *part["arguments"]]
        environment = os.environ | part["environment"]
        processes.append(
            subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
        )
    report: dict[str, Any] = {}
    try:
        for url in task["ready"]:
            report[url] = wait(url, processes)
        request = urllib.request.Request(
            task["completions"], task["body"].encode(), {"content-type": "application/json"}
        )
        with opener().open(request, timeout=60) as response:
            report["text"] = json.load(response)["choices"][0]["text"]
        report["commands"] = [run(each) for each in task["commands"]]
        report["pages"] = [read(url) for url in task["pages"]]
    except Exception as error:
        report["error"] = repr(error)
    report["logs"] = {name: open(f"/tmp/{name}.log").read()[-4000:] for name in task["parts"]}  # noqa: SIM115
    json.dump(report, sys.stdout)


def opener() -> urllib.request.OpenerDirector:
    return urllib.request.build_opener(urllib.request.ProxyHandler({}))


def read(url: str) -> str:
    with opener().open(url, timeout=10) as response:
        return str(response.read().decode())


def wait(url: str, processes: list[subprocess.Popen[bytes]]) -> bool:
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        exited = {str(one.args): one.returncode for one in processes if one.poll() is not None}
        if exited:
            raise RuntimeError(f"ended, with their exit codes: {exited}")
        try:
            return bool(read(url))
        except OSError:  # that it is not ready is one as well
            time.sleep(0.05)
    raise TimeoutError(url)


def run(command: dict[str, object]) -> dict[str, object]:
    """``tandem`` as ``kubectl exec`` would run it: in a part's environment."""
    arguments, environment = command["arguments"], command["environment"]
    assert isinstance(arguments, list) and isinstance(environment, dict)
    done = subprocess.run(
        [sys.executable, "-m", "tandem", *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return {"code": done.returncode, "out": done.stdout + done.stderr}


main()
