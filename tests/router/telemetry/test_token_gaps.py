"""The histogram of times between tokens equals the library's."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Histogram, generate_latest

from tandem.router.telemetry.token_gaps import TokenGaps

BOUNDS = (0.01, 0.05, 1.0)
LABELS = ("model_name", "engine")


def test_the_page_is_as_the_library_writes_it() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    gaps = TokenGaps("gap_seconds", "Gaps.", LABELS, "0", BOUNDS)
    ours.register(gaps)
    histogram = Histogram("gap_seconds", "Gaps.", LABELS, buckets=BOUNDS, registry=theirs)
    for seconds, tokens in ((0.01, 1), (0.02, 1), (0.5, 2), (7.0, 1)):
        gaps.of("m").observe(seconds, tokens)
        for _ in range(tokens):
            histogram.labels("m", "0").observe(seconds / tokens)
    lines = generate_latest(theirs).decode().splitlines()
    assert generate_latest(ours).decode().splitlines() == [
        line for line in lines if "_created" not in line
    ]
