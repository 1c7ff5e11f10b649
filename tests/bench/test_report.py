"""Figures, result files, tables and plots."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from random import Random

import pytest

from tandem.bench.client.measured_response import MeasuredResponse
from tandem.bench.report.figures import deviation, median, percentile
from tandem.bench.report.plot import write_plot
from tandem.bench.report.result_file import default_name, read_detailed, write_result
from tandem.bench.report.result_table import result_table
from tandem.bench.report.serving_result import METRICS, Evaluation, serving_result
from tandem.shared.errors import UsageError

# Of vLLM's files, in their order.
VLLM_KEYS = [
    "duration",
    "completed",
    "failed",
    "total_input_tokens",
    "total_output_tokens",
    "request_throughput",
    "request_goodput",
    "output_throughput",
    "total_token_throughput",
    "input_lens",
    "output_lens",
    "ttfts",
    "itls",
    "latencies",
    "start_times",
    "queue_times",
    "generated_texts",
    "errors",
    "max_output_tokens_per_s",
    "max_concurrent_requests",
    "rtfx",
]


def response(
    start: float, arrivals: list[float], *, planned: float | None = None
) -> MeasuredResponse:
    result = MeasuredResponse(
        planned=start if planned is None else planned, sent_at=start, finished=True
    )
    result.arrivals = result.times = [start + at for at in arrivals]
    result.prompt_tokens, result.output_tokens = 10, len(arrivals)
    return result


def failure() -> MeasuredResponse:
    return MeasuredResponse(sent_at=1.0, error="HTTP 500: </script><b>", finished=True)


RESPONSES = [
    response(0.0, [0.2, 0.3, 0.5], planned=-0.1),
    response(0.4, [0.1]),
    response(0.5, [0.6, 0.7]),
    failure(),
]
ALL = Evaluation(
    metrics=tuple(METRICS), percents=(50.0, 99.9), goodput={"ttft": 0.5, "tpot": 0.2}, paced=True
)


def result(evaluation: Evaluation = ALL) -> dict:
    return serving_result(RESPONSES, [9, 9, 9, 9], 2.0, evaluation)


def test_figures_are_those_of_other_implementations() -> None:
    values = [Random(1).random() for _ in range(57)]
    quarters = statistics.quantiles(values, n=20, method="inclusive")
    assert [percentile(values, 5 * i) for i in range(1, 20)] == pytest.approx(quarters)
    assert deviation(values) == pytest.approx(statistics.pstdev(values))
    assert (percentile(values, 0), percentile(values, 100)) == (min(values), max(values))
    assert (percentile([], 50), median([]), deviation([])) == (0, 0, 0)


def test_a_result_has_vllms_names() -> None:
    figures = result(Evaluation())
    assert list(figures)[: len(VLLM_KEYS)] == VLLM_KEYS
    names = {
        f"{kind}_{metric}_ms"
        for metric in ("ttft", "tpot", "itl")
        for kind in ("mean", "median", "std", "p99")
    }
    assert set(figures) == {*VLLM_KEYS, "remote_prefill_tokens", *names}
    assert figures["request_goodput"] is None and "late_requests" not in figures


def test_the_figures_of_a_run() -> None:
    figures = result()
    assert (figures["completed"], figures["failed"]) == (3, 1)
    assert (figures["total_input_tokens"], figures["total_output_tokens"]) == (30, 6)
    assert figures["output_lens"] == [3, 1, 2, 0] and figures["input_lens"] == [10, 10, 10, 9]
    assert figures["output_throughput"] == 3 and figures["total_token_throughput"] == 18
    assert figures["mean_ttft_ms"] == pytest.approx(300)
    assert figures["mean_tpot_ms"] == pytest.approx((150 + 100) / 2)
    assert figures["mean_itl_ms"] == pytest.approx(400 / 3)
    assert figures["median_e2el_ms"] == pytest.approx(500)
    assert figures["mean_ttft_including_client_queue_ms"] == pytest.approx(1000 / 3)
    assert figures["p99.9_ttft_ms"] == pytest.approx(600, rel=0.01)
    assert figures["request_goodput"] == 1.0  # two of three, in two seconds
    assert (figures["late_requests"], round(figures["max_send_delay_ms"])) == (2, 1000)
    assert figures["max_output_tokens_per_s"] == 4 and figures["max_concurrent_requests"] == 2


def test_the_table_has_vllms_lines() -> None:
    table = result_table(result(Evaluation(paced=True)), Evaluation(paced=True), 5.0, 8)
    lines = table.splitlines()
    assert lines[0] == "============ Serving Benchmark Result ============"
    assert lines[1] == "Successful requests:                     3         "
    assert lines[3] == "Maximum request concurrency:             8         "
    assert lines[4] == "Request rate configured (RPS):           5.00      "
    assert "---------------Time to First Token----------------" in lines
    assert "P99 ITL (ms):                            198.00    " in lines
    assert "Sent over 10 ms late:                    2         " in lines
    assert max(map(len, lines)) <= 60 and lines[-1] == "=" * 50


def test_a_run_without_completed_requests_has_a_report() -> None:
    empty = serving_result([failure()], [5], 1.0, ALL)
    names = ("completed", "mean_ttft_ms", "max_output_tokens_per_s")
    assert [empty[name] for name in names] == [0, 0, 0]
    assert "Successful requests:" in result_table(empty, ALL, 1.0, None)


def test_file_names_are_vllms() -> None:
    settings = {
        "label": None,
        "backend": "openai",
        "ramp_up_strategy": None,
        "request_rate": float("inf"),
        "max_concurrency": 4,
    }
    assert default_name(settings, "org/m", "now") == "openai-infqps-concurrency4-m-now.json"
    ramp = {"ramp_up_strategy": "linear", "ramp_up_start_rps": 1, "ramp_up_end_rps": 9}
    name = default_name(settings | ramp | {"label": "x"}, "m", "now")
    assert name == "x-ramp-up-linear-1qps-9qps-concurrency4-m-now.json"


def test_results_are_appended_and_the_last_one_is_read(tmp_path: Path) -> None:
    path = tmp_path / "new" / "r.json"
    write_result(path, result())
    write_result(path, result() | {"label": "second"}, append=True)
    assert read_detailed(path)["label"] == "second"
    assert len(path.read_text().splitlines()) == 2


@pytest.mark.parametrize("content", ["", "x", "[1]", '{"ttfts": []}'])
def test_what_is_no_detailed_result_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "r.json"
    path.write_text(content)
    with pytest.raises(UsageError, match=r"r\.json"):
        read_detailed(path)


def test_a_plot_is_whole_by_itself_and_runs_no_text_of_a_result(tmp_path: Path) -> None:
    page = tmp_path / "p.html"
    write_plot(page, [result() | {"label": "</script><script>alert(1)"}, result()])
    text = page.read_text()
    assert text.count("</script") == 1 and "http" not in text.replace("http-equiv", "").replace(
        "http://www.w3.org/2000/svg", ""
    ).replace("HTTP 500", "")
    assert "default-src 'none'" in text
    data = text.partition("const results = ")[2].partition(";\n")[0]
    first, _ = json.loads(data)
    assert [one["at"] for one in first["requests"]] == [0, 0.4, 0.5, 1.0]
    assert first["ttft"][0] == 100 and first["ttft"][-1] == 600


def test_a_broken_result_is_no_plot(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no valid details"):
        write_plot(tmp_path / "p.html", [result() | {"itls": "x"}])
    with pytest.raises(UsageError, match="cannot write"):
        write_plot(tmp_path / "none" / "p.html", [result()])
