"""The commands, run against a server without a model."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from tandem.__main__ import cli
from tandem.bench import progress_bar
from tandem.bench.grouped_command import repeat_flags
from tandem.shared.errors import TandemError
from tandem.tests.bench.fake_api import FakeApi, fake_api
from tandem.tests.support.clock import SteppedClock

TRACE = (
    '{"timestamp": 0, "input_length": 600, "output_length": 3, "hash_ids": [1, 2]}\n'
    '{"timestamp": 20, "input_length": 520, "output_length": 2, "hash_ids": [1, 3]}\n'
)


@contextmanager
def running(**settings: Any) -> Iterator[FakeApi]:
    """The server in its own event loop, since commands have theirs."""
    servers: list[tuple[FakeApi, asyncio.Event, asyncio.AbstractEventLoop]] = []
    ready = threading.Event()

    async def serve() -> None:
        async with fake_api(**settings) as api:
            stop = asyncio.Event()
            servers.append((api, stop, asyncio.get_running_loop()))
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=asyncio.run, args=[serve()])
    thread.start()
    assert ready.wait(10)
    api, stop, loop = servers[0]
    try:
        yield api
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)


def run(*arguments: object) -> str:
    """The output of a command. Raises its error."""
    done = CliRunner().invoke(cli, ["bench", *map(str, arguments)], standalone_mode=False)
    if done.exception:
        raise done.exception
    return done.output


def test_serve_prints_a_table_and_writes_result_and_plot(tmp_path: Path) -> None:
    result, page = tmp_path / "out" / "r.json", tmp_path / "p.html"
    with running() as api:
        url = f"--base-url=http://127.0.0.1:{api.port}"
        sizes = ["--num-prompts=7", "--random-input-len=20", "--random-output-len=4"]
        rate = ["--request-rate=500", "--max-concurrency=3", "--goodput", "ttft:900", "e2el:900"]
        save_options = ["--save-result", "--save-detailed", f"--result-dir={tmp_path / 'out'}"]
        more = ["--result-filename=r.json", "--metadata", "tp=1", "kind=fake", f"--plot={page}"]
        sampled = ["--temperature=0", "--extra-body", '{"top_k": 3}', "--header", "x-a=1", "x-b=2"]
        table = run("serve", url, *sizes, *rate, *save_options, *more, *sampled, "--num-warmups=2")
    assert len(api.bodies) == 9
    assert api.bodies[-1] | {"prompt": None} == {
        "model": "fake",
        "prompt": None,
        "max_tokens": 4,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "temperature": 0.0,
        "top_k": 3,
    }
    assert {len(body["prompt"]) for body in api.bodies} == {20}
    assert "x-b: 2" in api.heads[-1] and "x-request-id: bench-" in api.heads[-1]
    content = json.loads(result.read_text())
    assert (content["completed"], content["total_output_tokens"]) == (7, 28)
    assert (content["model_id"], content["kind"], content["request_rate"]) == ("fake", "fake", 500)
    assert content["request_goodput"] > 0 and len(content["queue_times"]) == 7
    assert "Successful requests:                     7" in table
    assert "Input tokens prefilled remotely:         133" in table
    assert "<title>" in page.read_text()
    assert "two" not in run("plot", tmp_path / "q.html", result, result)
    assert (tmp_path / "q.html").exists()


def test_serve_replays_a_trace_at_its_times(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(TRACE)
    with running() as api:
        run(
            "serve",
            f"--port={api.port}",
            "--dataset-name=mooncake",
            f"--dataset-path={trace}",
            "--speed=2",
            "--save-result",
            f"--result-dir={tmp_path}",
            "--result-filename=r.json",
        )
    first, second = (body["prompt"] for body in api.bodies)
    assert (len(first), len(second)) == (600, 520) and first[:512] == second[:512]
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["duration"] >= 0.01 and "late_requests" in result and "ttfts" not in result


def test_probes_are_sent_beside_the_load_and_reported_apart() -> None:
    with running(delay=0.01) as api:
        options = ["--num-prompts=2", "--random-input-len=3", "--random-output-len=8"]
        table = run("serve", f"--port={api.port}", *options, "--probe-request-rate=100")
    probes = [body for body in api.bodies if body["prompt"] == "Hi"]
    assert len(probes) == len(api.bodies) - 2 > 0
    assert {body["max_tokens"] for body in probes} == {1}
    assert f"Probe requests completed:                {len(probes)}" in table
    assert "Successful requests:                     2" in table


def test_ctrl_c_reports_the_completed_requests(tmp_path: Path) -> None:
    class Interrupting(list[dict[str, Any]]):
        def append(self, body: dict[str, Any]) -> None:
            super().append(body)
            if len(self) == 2:  # one at a time: the first has been answered
                os.kill(os.getpid(), signal.SIGINT)

    page = tmp_path / "p.html"
    with running(delay=0.02) as api:
        api.bodies = Interrupting()
        sizes = ["--num-prompts=1000", "--random-input-len=3", "--random-output-len=8"]
        at_once = ["--max-concurrency=1", "--request-rate=20", f"--plot={page}"]
        command = ["bench", "serve", f"--port={api.port}", *sizes, *at_once]
        done = CliRunner().invoke(cli, command, standalone_mode=False)
    assert isinstance(done.exception, click.Abort)
    assert "1,000 requests of 3 + 8 tokens on average are sent over " in done.stderr
    assert "the result is of the 1 complete responses to 1,000 requests" in done.stderr
    assert "Successful requests:                     1" in done.stdout and page.exists()


def test_progress_is_a_line_now_and_then_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SteppedClock()
    monkeypatch.setattr(progress_bar.time, "monotonic", clock)
    for hidden in (False, True):
        with progress_bar.progress_bar("Requests", 2000, hidden=hidden) as advance:
            for _ in range(1000):
                clock.now += 1 / 32
                advance()
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"Requests: {count} of 2,000" for count in (320, 640, 960)]


def test_serve_chats(tmp_path: Path) -> None:
    lines = tmp_path / "prompts.jsonl"
    lines.write_text('{"prompt": "one two"}\n')
    with running() as api:
        options = ["--backend=openai-chat", "--dataset-name=custom", f"--dataset-path={lines}"]
        run("serve", f"--port={api.port}", *options, "--num-prompts=0", "--custom-output-len=2")
    assert api.bodies[0]["messages"] == [{"role": "user", "content": "one two"}]
    assert api.bodies[0]["max_completion_tokens"] == 2


def test_a_failing_server_is_named_once_and_fails_the_command() -> None:
    with running(statuses=[(503, "busy")] * 4) as api:
        options = ["--num-prompts=4", "--random-input-len=2"]
        with pytest.raises(TandemError, match="all 4 requests failed"):
            run("serve", f"--port={api.port}", *options)


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_interference_measures_victims_and_attacker(tmp_path: Path, backend: str) -> None:
    with running(delay=0.002, reports_ids=True) as api:
        scene = ["--rounds=2", "--prompt-tokens=50", "--alone-seconds=0.1", "--num-warmups=0"]
        output = tmp_path / "i.json"
        url = [f"--port={api.port}", f"--backend={backend}", "--victims=2"]
        table = run("interference", *url, *scene, f"--output-json={output}")
    result = json.loads(output.read_text())
    assert len(result["rounds"]) == 2 and result["victims"] == 2 and result["prompt_tokens"] == 50
    assert result["share_kept"] > 0 and result["victim_speed"] > 0
    assert result["longest_gap_ms"] > 0 and result["attacker_ttft_over_alone"] > 0
    assert "Share kept during attack (%):" in table
    assert all(body["temperature"] == 0 and body["ignore_eos"] for body in api.bodies[-4:])


def test_a_victim_that_ends_too_early_is_an_error_with_the_remedy() -> None:
    with running() as api, pytest.raises(TandemError, match="raise --victim-tokens"):
        scene = ["--prompt-tokens=5", "--victim-tokens=100", "--alone-seconds=0.1"]
        run("interference", f"--port={api.port}", *scene)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--dataset-path=x"], "--dataset-path x is not used with --dataset-name random"),
        (["--dataset-name=sharegpt"], "--dataset-name sharegpt needs --dataset-path"),
        (["--num-prompts=0"], "--num-prompts 0"),
        (["--goodput", "ttft"], "--goodput"),
        (["--goodput", "itl:3"], "--goodput 'itl:3': the metric must be one of ttft, tpot, e2el"),
        (["--metric-percentiles=101"], "each number must be from 0 to 100"),
        (["--metric-percentiles=x"], "not a list of numbers"),
        (["--percentile-metrics=ttft,x"], "--percentile-metrics 'x' is not one of ttft"),
        (["--request-rate=nan"], "nan"),
        (["--request-rate=0"], "0.0 is out of range: it must be more than 0"),
        (["--burstiness=-1"], "must be more than 0"),
        (["--probe-request-rate=inf"], "--probe-request-rate must be finite"),
        (["--ramp-up-strategy=linear"], "--ramp-up-strategy needs"),
        (["--extra-body=["], "--extra-body is not JSON"),
        (["--extra-body=[]"], "--extra-body must be a JSON object"),
        (["--metadata=x"], "--metadata 'x' is not KEY=VALUE"),
        (["--header", "a=1", "b"], "--header 'b' is not KEY=VALUE"),
        (["--base-url=ftp://x"], "--base-url 'ftp://x'"),
        (["--endpoint=v1"], "--endpoint 'v1' is not a path"),
        (["--request-id-prefix=a\nb"], "--header x-request-id"),
        (["--plot=/dev/null/p.html"], "cannot write /dev/null/p.html"),
        (["--save-result", "--result-filename=."], "it is a folder"),
        (["--compare-with=x.json"], "--compare-with needs --plot"),
        (["--compare-with=x.json", "--plot=p.html"], "cannot read x.json"),
        (["--random-range-ratio=1"], "must be at least 0 and less than 1"),
        (["--profile"], "No such option"),
    ],
)
def test_a_wrong_option_is_named(arguments: list[str], words: str) -> None:
    with running() as api:
        with pytest.raises((TandemError, click.UsageError)) as raised:
            run("serve", f"--port={api.port}", *arguments)
        assert api.bodies == []
    error = raised.value
    message = error.format_message() if isinstance(error, click.UsageError) else str(error)
    assert words in message


def test_flags_of_several_words() -> None:
    args = ["--goodput", "a:1", "b:2", "--port", "3", "--goodput=c:3", "x"]
    expected = ["--goodput", "a:1", "--goodput", "b:2", "--port", "3", "--goodput=c:3", "x"]
    assert repeat_flags(args, {"--goodput"}) == expected


@pytest.mark.parametrize("name", ["serve", "interference"])
def test_help_fits_80_columns_and_names_no_group_twice(name: str) -> None:
    done = CliRunner().invoke(cli, ["bench", name, "--help"], terminal_width=80)
    titles = [line for line in done.output.splitlines() if line.endswith(":") and line[0] != " "]
    assert len(titles) == len(set(titles)) >= 3
    assert max(map(len, done.output.splitlines())) <= 80
