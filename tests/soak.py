"""A long mixed load with hang-ups, kills and restarts, after which nothing may be held.

    python -m tandem.tests.soak --minutes 30

A router, two prefill nodes and two decode nodes serve a tiny model. Clients send greedy requests
whose tokens are known, streamed and whole, some with several choices; they hang up in the middle,
or send nonsense. Meanwhile nodes are killed, drained, stopped for seconds and started again, and
the router is restarted. Each answer must be the known one or one clean error, and a stream that has
begun the known one unless the router goes: one decode node is always there to continue it.
Afterwards memory, descriptors, threads, blocks and series must be what they were before.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import random
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tandem.benchmarks.support.report import write
from tandem.router.doctor.survey import survey
from tandem.tests.end_to_end.support.baseline import Baseline
from tandem.tests.end_to_end.support.clients import COMPLETIONS, prompt
from tandem.tests.end_to_end.support.cluster import (
    Part,
    TestCluster,
    committed_transfers,
    get,
    node_metric,
    running,
    until,
)
from tandem.tests.support.checkpoints.tiny_models import cached

CLIENTS = 6
# Prompts that come again and again, so that prefixes are cached, evicted and handed over.
SEEDS = 24
TOKENS = 24
# Long enough that many streams have begun when their node goes.
LONG_SEEDS, LONG_TOKENS = 6, 200
REQUEST_SECONDS = 90.0
PAUSE_SECONDS = 4.0  # longer than the silence after which a peer is lost
FAULT_SECONDS = 8.0  # from the mending of one fault to the next
# Before the baseline: the faults of a row are made at the same time. What was started again first
# has the series of most faults.
WARM_UP = (
    ("restart the router",),
    ("kill prefill-1", "kill decode-1"),
    ("stop prefill-0 for a while",),
)
DONE = 'tandem_transfers_total{outcome="done"}'
# Allocators keep what they had at the busiest moment.
RSS_GROWTH, RSS_MARGIN = 1.25, 48 << 20
SERIES_MARGIN = 1.1


class UncleanError(AssertionError):
    """A response that is neither the expected output nor a clean error."""


@dataclass
class Tally:
    """Counts of requests by kind and outcome."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    unclean: list[str] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, kind: str, outcome: str) -> None:
        with self._lock:
            self.counts[kind, outcome] += 1

    def complain(self, what: str) -> None:
        with self._lock:
            self.unclean.append(what)

    def total(self, outcome: str) -> int:
        return sum(n for (_, o), n in self.counts.items() if o == outcome)


class Soak:
    """One cluster under load. Each client pauses for up to ``pause`` seconds after an answer, and
    the faults ``interval`` seconds after one was mended."""

    def __init__(
        self,
        cluster: TestCluster,
        seed: int = 0,
        pause: float = 0.0,
        interval: float = FAULT_SECONDS,
    ) -> None:
        self._pause_seconds = pause
        self._interval_seconds = interval
        self._cluster = cluster
        self._rng = random.Random(seed)
        self._ports: dict[str, int] = {}
        self._parts: dict[str, Part] = {}
        self._expected: dict[int, list[int]] = {}
        self._long: dict[int, list[int]] = {}
        self._stopping = threading.Event()
        self._router_is_away = threading.Event()
        self.tally = Tally()

    # ---- the whole course ------------------------------------------------------------------

    def run(self, seconds: float) -> dict[str, float]:
        """Warm up, take the baseline, load and break, and compare. Gives the figures; raises
        ``AssertionError`` for whatever is wrong."""
        self._start()
        self._expected = {seed: self._output_ids(_body(seed)) for seed in range(SEEDS)}
        self._long = {seed: self._output_ids(_long_body(seed)) for seed in range(LONG_SEEDS)}
        self._under_load(self._warm_up)
        baseline = Baseline(self._parts, self._cluster.registry)
        memory, series = self._memory(), self._series()
        self.tally = Tally()
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self._under_load(lambda: self._break_one_after_another(end))
        for seed in range(SEEDS):
            assert self._output_ids(_body(seed)) == self._expected[seed], (
                f"seed {seed} after the load"
            )
        baseline.check(60.0)
        self._check_grown("resident bytes", memory, self._memory(), RSS_GROWTH, RSS_MARGIN)
        self._check_grown("series", series, self._series(), SERIES_MARGIN, 40)
        num_right = self.tally.total("right")
        assert num_right > self.tally.total("error"), self.tally.counts
        return {
            "requests": sum(self.tally.counts.values()),
            "right answers": num_right,
            "clean errors": self.tally.total("error"),
            "hung up by their clients": self.tally.total("hung up"),
            "wrong answers": 0,
            "faults": sum(self.tally.faults.values()),
            "growth of resident memory, worst part": max(
                after / memory[name] for name, after in self._memory().items()
            ),
        }

    def _start(self) -> None:
        router = self._cluster.start_router("--drain-timeout=2")
        self._ports = {"http": router.details["http"], "registry": router.details["registry"]}
        names = ("prefill-0", "prefill-1", "decode-0", "decode-1")
        parts = self._cluster.start_nodes(*(self._arguments(name) for name in names))
        self._parts = dict(zip(names, parts, strict=True))
        self._cluster.wait_parts(*parts)

    def _arguments(self, name: str) -> tuple[str, ...]:
        return (f"{name.partition('-')[0]}-node", f"--node-id={name}", "--drain-timeout=3")

    def _under_load(self, breaks: Callable[[], None]) -> None:
        """Clients ask while ``breaks`` makes faults; then everything is mended and at rest."""
        self._stopping.clear()
        clients = [
            threading.Thread(target=self._ask_on, args=(self._rng.random(),), daemon=True)
            for _ in range(CLIENTS)
        ]
        for client in clients:
            client.start()
        breaks()
        self._stopping.set()
        for client in clients:
            client.join(REQUEST_SECONDS + 10)
            assert not client.is_alive(), "a client still waits for its response"
        assert not self.tally.unclean, "\n".join(self.tally.unclean[:20])
        self._cluster.wait_parts(*self._parts.values())
        # Nodes greet each other on demand; a baseline needs every pair to have met.
        until(self._all_have_met, "every decode node to have met every prefill node", 60.0)
        self._cluster.wait_idle(*self._parts.values())

    def _warm_up(self) -> None:
        """Break each kind of part once, and let every node serve in between."""
        for faults in WARM_UP:
            with ThreadPoolExecutor(len(faults)) as pool:
                list(pool.map(self._break, faults))
            until(self._all_have_served, "every node to have served", 60.0)

    def _break_one_after_another(self, end: float) -> None:
        """Every fault in a drawn order, until ``end`` (monotonic)."""
        for name in self._rng.sample(list(self._faults()), k=len(self._faults())):
            self._stopping.wait(min(self._interval_seconds, end - time.monotonic()))
            if time.monotonic() >= end:
                return
            self._break(name)

    def _break(self, name: str) -> None:
        self._faults()[name]()
        self.tally.faults[name] += 1

    def _all_have_served(self) -> bool:
        """Since they were started, KV having moved. Nodes that hold the prompts of the load keep
        them, so a new prompt is sent first, which may go to any node."""
        new = {"prompt": prompt(random.randrange(SEEDS, 10**6), 200), "max_tokens": 2}
        with contextlib.suppress(OSError, http.client.HTTPException, UncleanError):
            self._post(_body(0) | new)
        return all(
            node_metric(part, DONE) if name.startswith("prefill") else committed_transfers(part)
            for name, part in self._parts.items()
        )

    def _all_have_met(self) -> bool:
        cluster_survey = survey(self._cluster.url, self._cluster.registry)
        pairs = [report for _, report in cluster_survey.reports()]
        return len(pairs) == 4 and not any(report.problem for report in pairs)

    # ---- faults ----------------------------------------------------------------------------

    def _faults(self) -> dict[str, Callable[[], None]]:
        return {
            "kill prefill-1": lambda: self._kill("prefill-1"),
            "kill decode-1": lambda: self._kill("decode-1"),
            "kill a rank of prefill-1": lambda: self._kill_rank("prefill-1"),
            "kill a rank of decode-1": lambda: self._kill_rank("decode-1"),
            "drain prefill-1": lambda: self._drain("prefill-1"),
            "drain decode-1": lambda: self._drain("decode-1"),
            "stop prefill-0 for a while": lambda: self._pause("prefill-0"),
            "stop decode-1 for a while": lambda: self._pause("decode-1"),
            "restart the router": self._restart_router,
        }

    def _kill(self, name: str) -> None:
        self._parts[name].kill()
        self._start_again(name)

    def _kill_rank(self, name: str) -> None:
        part = self._parts[name]
        psutil.Process(part.process.pid).children()[0].kill()
        part.process.wait(20)
        self._start_again(name)

    def _drain(self, name: str) -> None:
        part = self._parts[name]
        part.process.terminate()
        assert part.process.wait(20) == 0, part.log.read_text()[-2000:]
        self._start_again(name)

    def _start_again(self, name: str) -> None:
        self._parts[name] = self._cluster.start_node(*self._arguments(name))

    def _pause(self, name: str) -> None:
        """Its ranks stand still, data plane and all, for longer than peers wait; of a decode node
        the head too, so that its router misses it."""
        head = psutil.Process(self._parts[name].process.pid)
        processes = [*head.children(), *([head] if name.startswith("decode") else [])]
        for process in processes:
            process.send_signal(signal.SIGSTOP)
        self._stopping.wait(PAUSE_SECONDS)
        for process in processes:
            process.send_signal(signal.SIGCONT)

    def _restart_router(self) -> None:
        router = self._cluster.router
        assert router is not None
        self._router_is_away.set()
        router.process.terminate()
        router.process.wait(20)
        self._cluster.start_router("--drain-timeout=2", **self._ports)
        self._cluster.wait_parts(*self._parts.values())
        self._router_is_away.clear()

    # ---- clients ---------------------------------------------------------------------------

    def _ask_on(self, seed: float) -> None:
        """One client, until it is stopped."""
        rng = random.Random(seed)
        kinds: tuple[tuple[Callable[[random.Random], str], str], ...] = (
            (self._whole, "whole"),
            (self._streamed, "streamed"),
            (self._long_streamed, "long stream"),
            (self._several, "several choices"),
            (self._hung_up, "hung up"),
            (self._nonsense, "nonsense"),
        )
        while not self._stopping.is_set():
            ask, kind = rng.choice(kinds)
            away = self._router_is_away.is_set()
            try:
                outcome = ask(rng)
                self.tally.add(kind, outcome)
                if outcome == "error":
                    self._stopping.wait(0.1)  # errors come at once while no node is there
            except (ConnectionError, http.client.HTTPException, TimeoutError) as error:
                # A router that ends cuts what its drain's deadline leaves, and refuses for a while.
                if away or self._router_is_away.is_set():
                    self.tally.add(kind, "router away")
                    self._stopping.wait(0.1)
                else:
                    self.tally.complain(f"{kind}: {type(error).__name__} {error}")
            except UncleanError as error:
                self.tally.complain(f"{kind}: {error}")
            self._stopping.wait(rng.uniform(0, self._pause_seconds))

    def _whole(self, rng: random.Random) -> str:
        seed = rng.randrange(SEEDS)
        status, body = self._post(_body(seed))
        return self._judge(status, body, [self._expected[seed]])

    def _several(self, rng: random.Random) -> str:
        seed = rng.randrange(SEEDS)
        status, body = self._post(_body(seed) | {"n": 2, "logprobs": 2})
        return self._judge(status, body, [self._expected[seed]] * 2)

    def _nonsense(self, rng: random.Random) -> str:
        bad: list[dict[str, Any]] = [{"prompt": []}, {"prompt": [1], "n": 10**6}, {"prompt": [-1]}]
        status, body = self._post(rng.choice(bad))
        if status not in (400, 503) or "message" not in body.get("error", {}):
            raise UncleanError(f"{status} {body}")
        return "right" if status == 400 else "error"

    def _streamed(self, rng: random.Random) -> str:
        seed = rng.randrange(SEEDS)
        return self._stream_to_its_end(_body(seed), self._expected[seed])

    def _long_streamed(self, rng: random.Random) -> str:
        seed = rng.randrange(LONG_SEEDS)
        return self._stream_to_its_end(_long_body(seed), self._long[seed])

    def _stream_to_its_end(self, body: dict[str, Any], expected: list[int]) -> str:
        tokens: list[int] = []
        away = self._router_is_away.is_set()
        with self._stream(body) as (status, events):
            if status != 200:
                return self._judge(status, next(events), [])
            for event in events:
                if "error" in event and not (away or self._router_is_away.is_set()):
                    raise UncleanError(f"a stream ended after {len(tokens)} tokens: {event}")
                if "error" in event:
                    return "error"
                tokens += event["choices"][0].get("token_ids", ())
        if tokens != expected:
            raise UncleanError(f"{body['prompt'][:3]}...: {tokens}, known is {expected}")
        return "right"

    def _hung_up(self, rng: random.Random) -> str:
        """Before the first token or after some."""
        body = _body(rng.randrange(SEEDS)) | {"max_tokens": 200}
        with self._stream(body) as (status, events):
            for _ in range(rng.randrange(6) if status == 200 else 0):
                next(events, None)
        return "hung up"

    def _judge(self, status: int, body: dict[str, Any], expected: list[list[int]]) -> str:
        if status != 200:
            if status not in (500, 502, 503) or "message" not in body.get("error", {}):
                raise UncleanError(f"{status} {body}")
            return "error"
        outputs = [choice["token_ids"] for choice in body["choices"]]
        if outputs != expected:
            raise UncleanError(f"{outputs}, known is {expected}")
        return "right"

    def _output_ids(self, body: dict[str, Any]) -> list[int]:
        status, response = self._post(body)
        assert status == 200, response
        return list(response["choices"][0]["token_ids"])

    def _post(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        with self._request(body) as response:
            return response.status, json.loads(response.read())

    @contextlib.contextmanager
    def _stream(self, body: dict[str, Any]) -> Iterator[tuple[int, Iterator[dict[str, Any]]]]:
        with self._request(body | {"stream": True}) as response:
            yield response.status, _events(response)

    @contextlib.contextmanager
    def _request(self, body: dict[str, Any]) -> Iterator[http.client.HTTPResponse]:
        connection = http.client.HTTPConnection(
            "127.0.0.1", self._ports["http"], timeout=REQUEST_SECONDS
        )
        try:
            headers = {"content-type": "application/json"}
            connection.request("POST", COMPLETIONS, json.dumps(body), headers)
            yield connection.getresponse()
        finally:
            connection.close()

    # ---- what is held ----------------------------------------------------------------------

    def _memory(self) -> dict[str, int]:
        """Resident bytes of each part's processes."""
        assert self._cluster.router is not None
        parts = {**self._parts, "router": self._cluster.router}
        return {name: _resident(part) for name, part in parts.items()}

    def _series(self) -> dict[str, int]:
        """The most series of any part of a kind: each sees other faults first."""
        texts = [(name.split("-")[0], part.metrics()) for name, part in self._parts.items()]
        texts.append(("router", get(f"{self._cluster.url}/metrics")))
        most: Counter[str] = Counter()
        for kind, text in texts:
            count = sum(not line.startswith("#") for line in text.splitlines())
            most[kind] = max(most[kind], count)
        return dict(most)

    @staticmethod
    def _check_grown(
        what: str, before: dict[str, int], after: dict[str, int], factor: float, margin: float
    ) -> None:
        grown = {
            name: (before[name], now)
            for name, now in after.items()
            if now > factor * before[name] + margin
        }
        assert not grown, f"{what} before and after: {grown}"


def _body(seed: int) -> dict[str, Any]:
    return {
        "prompt": prompt(seed, 20 + 19 * seed),
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }


def _long_body(seed: int) -> dict[str, Any]:
    return _body(seed) | {"max_tokens": LONG_TOKENS}


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The events of a stream up to ``[DONE]``, or the one body of a refusal."""
    if response.status != 200:
        yield json.loads(response.read())
        return
    for raw in response:
        line = raw.decode().strip()
        if line == "data: [DONE]":
            return
        if line.startswith("data: "):
            event = json.loads(line.removeprefix("data: "))
            yield event
            if "error" in event:
                return
    raise UncleanError("a stream ended without [DONE] and without an error")


def _resident(part: Part) -> int:
    head = psutil.Process(part.process.pid)
    return sum(process.memory_info().rss for process in [head, *head.children(recursive=True)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = str(cached("qwen3", Path(folder)))
        with running(Path(folder), model) as cluster:
            soak = Soak(cluster, options.seed)
            figures = soak.run(60 * options.minutes)
    for (kind, outcome), count in sorted(soak.tally.counts.items()):
        print(f"{kind}: {outcome} {count}")
    for fault, count in sorted(soak.tally.faults.items()):
        print(f"{fault}: {count}")
    rows = [
        {
            "metric": f"soak of {options.minutes:g} minutes: {name}",
            "value": value,
            "unit": "1",
            "goal": "<=0" if name == "wrong answers" else "",
        }
        for name, value in figures.items()
    ]
    print(write("soak", rows).read_text())


if __name__ == "__main__":
    main()
