"""The longest delay that one request causes to other streams: ``python -m ...router.holds``.

A router and a simulated decode node that responds immediately share an event loop; the client runs
in a thread with a pre-encoded body. A task that wakes every millisecond stands for the other
streams: its longest delay is the hold, caused by the loop or by a thread that keeps the GIL. Each
figure is the best of ``--rounds``, because the machine is shared and a delay in the code shows in
every round.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import http.client
import json
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tandem.benchmarks.support.report import benchmark_parser, publish
from tandem.router.server import MAX_DIGITS, SWITCH_SECONDS
from tandem.shared.config.router import RouterConfig
from tandem.tests.router.support import Cluster, cluster

CONTEXT = 131_072
LARGEST = RouterConfig().max_body_bytes
PERIOD = 0.001
HI = [{"role": "user", "content": "hi"}]
TOOLS = [
    {"type": "function", "function": {"name": f"f{i}", "parameters": {"type": "object"}}}
    for i in range(64)
]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def full(unit: str, head: str = '{"prompt":[', tail: str = "]}") -> bytes:
    """A body of the maximum size, filled with repeated units."""
    count = (LARGEST - len(head) - len(tail)) // len(unit.encode())
    return (head + (unit * count).removesuffix(",") + tail).encode()


def body(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


Cases = dict[str, tuple[str, bytes]]

ORDINARY: Cases = {
    "chat": (CHAT, body(messages=HI * 20, max_tokens=200, stream=True)),
    "chat with 64 tools": (CHAT, body(messages=HI, tools=TOOLS, max_tokens=200)),
    "prompt of 8,000 words": (COMPLETIONS, body(prompt="wor " * 8000, max_tokens=200)),
    "prompt of 8,000 tokens": (COMPLETIONS, body(prompt=[5] * 8000, max_tokens=200, stream=True)),
    "20 logprobs": (CHAT, body(messages=HI, logprobs=True, top_logprobs=20, max_tokens=200)),
    "16 choices": (COMPLETIONS, body(prompt="hi", n=16, max_tokens=200, stream=True)),
}
# Bodies of the largest size and responses near their limits, accepted or rejected.
LARGE: Cases = {
    "one text": (COMPLETIONS, full("wor ", '{"prompt":"', '"}')),
    "one text of escapes": (COMPLETIONS, full("\\u00e9", '{"prompt":"', '"}')),
    "one text of JSON": (COMPLETIONS, full(r"{\"a\":[]}", '{"prompt":"', '"}')),
    "token ids": (COMPLETIONS, full("50000,")),
    "short numbers": (COMPLETIONS, full("1,")),
    "decimals": (COMPLETIONS, full("1.5,")),
    "long integers": (COMPLETIONS, full("1" * 600 + ",")),
    "short strings": (COMPLETIONS, full('"",')),
    "messages": (CHAT, full('{"role":"user","content":"' + "x" * 93 + '"},', '{"messages":[')),
    "empty arrays, refused": (COMPLETIONS, full("[],")),
    "nested arrays, refused": (COMPLETIONS, full("[" * 60 + "]" * 60 + ",")),
    "as many empty arrays as are allowed": (
        COMPLETIONS,
        b'{"prompt":[%b]}' % b",".join([b"[]"] * 199_000),
    ),
    "as many fields as are allowed": (
        CHAT,
        body(messages=HI, x={str(number): 1 for number in range(199_000)}),
    ),
    "answer with 60,000 logprobs": (
        COMPLETIONS,
        body(prompt=[5] * 60_000, max_tokens=1, echo=True, logprobs=1),
    ),
    "answer with 4 million token ids": (
        COMPLETIONS,
        body(prompt=[[5] * 16_384] * 8, n=32, max_tokens=1, echo=True, return_token_ids=True),
    ),
}


class Hold:
    """The longest delay of a task, in seconds."""

    def __init__(self) -> None:
        self.seconds = 0.0

    async def watch(self) -> None:
        while True:
            start = time.perf_counter()
            await asyncio.sleep(PERIOD)
            self.seconds = max(self.seconds, time.perf_counter() - start - PERIOD)


@asynccontextmanager
async def watched() -> AsyncIterator[Hold]:
    """Watches the running loop while the block runs."""
    hold = Hold()
    watching = asyncio.create_task(hold.watch())
    try:
        yield hold
    finally:
        await asyncio.sleep(2 * PERIOD)  # lets the probe notice its delay
        watching.cancel()


def post(port: int, path: str, content: bytes) -> int:
    """Send a request, discard the response body, and return the status."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    try:
        connection.request("POST", path, content, {"content-type": "application/json"})
        response = connection.getresponse()
        while response.read(1 << 16):
            pass
        return response.status
    finally:
        connection.close()


async def longest(c: Cluster, cases: Cases, rounds: int) -> tuple[float, str]:
    """The longest hold over all requests, each by its best round, and the request that causes
    it."""
    best = []
    for case, (path, content) in cases.items():
        seconds = []
        for _ in range(rounds):
            gc.collect()
            gc.freeze()
            async with watched() as hold:
                status = await asyncio.to_thread(post, c.router.http_port, path, content)
            seconds.append(hold.seconds)
        print(f"  {case}: {min(seconds) * 1000:.1f} ms, status {status}")
        best.append((min(seconds), case))
    return max(best)


async def measure(rounds: int) -> list[dict[str, Any]]:
    """Rows of the report."""
    rows = []
    options: dict[str, Any] = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}
    with TemporaryDirectory() as folder:
        async with cluster(Path(folder), context=CONTEXT, **options) as c:
            c.node.reply, c.node.chunk = c.encode("hello world ") * 100, 1
            for kind, cases, limit in (
                ("ordinary requests", ORDINARY, 20),
                ("the largest bodies and answers", LARGE, 100),
            ):
                seconds, case = await longest(c, cases, rounds)
                rows.append(
                    {
                        "metric": f"longest hold of others by {kind} ({case})",
                        "value": seconds * 1000,
                        "unit": "ms",
                        "goal": f"<={limit}",
                    }
                )
    return rows


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse ``arguments``, by default the command line's."""
    return benchmark_parser(__doc__, rounds=7).parse_args(arguments)


def main() -> None:
    options = parse()
    sys.setswitchinterval(SWITCH_SECONDS)  # as a router's process
    sys.set_int_max_str_digits(MAX_DIGITS)
    publish("router/holds", asyncio.run(measure(options.rounds)), dry=options.dry)


if __name__ == "__main__":
    main()
