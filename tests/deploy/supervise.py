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
    told = json.load(sys.stdin)
    started = []
    for name, part in told["parts"].items():
        log = open(f"/tmp/{name}.log", "w")  # noqa: SIM115 - the part's, until all end
        command = [sys.executable, "-m", "tandem", *part["arguments"]]
        environment = os.environ | part["environment"]
        started.append(
            subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
        )
    asked: dict[str, Any] = {}
    try:
        for url in told["ready"]:
            asked[url] = wait(url, started)
        request = urllib.request.Request(
            told["completions"], told["body"].encode(), {"content-type": "application/json"}
        )
        with opener().open(request, timeout=60) as answer:
            asked["text"] = json.load(answer)["choices"][0]["text"]
        asked["commands"] = [run(each) for each in told["commands"]]
        asked["pages"] = [read(url) for url in told["pages"]]
    except Exception as error:
        asked["error"] = repr(error)
    asked["logs"] = {name: open(f"/tmp/{name}.log").read()[-4000:] for name in told["parts"]}  # noqa: SIM115
    json.dump(asked, sys.stdout)


def opener() -> urllib.request.OpenerDirector:
    return urllib.request.build_opener(urllib.request.ProxyHandler({}))


def read(url: str) -> str:
    with opener().open(url, timeout=10) as answer:
        return str(answer.read().decode())


def wait(url: str, started: list[subprocess.Popen[bytes]]) -> bool:
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        ended = [process.args for process in started if process.poll() is not None]
        if ended:
            raise RuntimeError(f"ended: {ended}")
        try:
            return bool(read(url))
        except OSError:  # that it is not ready is one as well
            time.sleep(0.05)
    raise TimeoutError(url)


def run(told: dict[str, object]) -> dict[str, object]:
    """``tandem`` as ``kubectl exec`` would run it: in a part's environment."""
    arguments, environment = told["arguments"], told["environment"]
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
