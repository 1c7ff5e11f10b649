"""An HTML page about one or two results: figures, timeline and distributions.

The page is self-contained: its script and styles are in ``plot.html``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

from ...shared.errors import UsageError
from .figures import percentile

TEMPLATE = Path(__file__).with_name("plot.html")
PLACEHOLDER = "/*RESULTS*/[]"
# Requests in the timeline, and points of a distribution: more cannot be distinguished on a screen.
MAX_REQUESTS = 2000
POINTS = 400
# A gap of at least this multiple of the median gap, and this many seconds, is drawn as a stall.
STALL_TIMES, STALL_SECONDS = 4.0, 0.03
NAMES = ("label", "model_id", "backend", "date", "duration", "completed", "failed")


def write_plot(path: Path, results: Sequence[Mapping[str, Any]]) -> None:
    """Write the page. Raises ``UsageError`` for broken results or an unwritable file."""
    try:
        stall = _stall(results)
        data = json.dumps([_plotted(one, stall) for one in results], separators=(",", ":"))
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise UsageError(f"a result has no valid details: {error!r}") from None
    # Escaped, so that no text of a result can end the script element.
    page = TEMPLATE.read_text(encoding="utf-8").replace(PLACEHOLDER, data.replace("<", "\\u003c"))
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from None


def _stall(results: Sequence[Mapping[str, Any]]) -> float:
    """Minimum seconds of a stall: the same for all results, by the faster one."""
    gaps = [[gap for itl in result["itls"] for gap in itl] for result in results]
    return max(STALL_TIMES * min((median(one) for one in gaps if one), default=0.0), STALL_SECONDS)


def _plotted(result: Mapping[str, Any], stall: float) -> dict[str, Any]:
    """The part of a result that the page shows."""
    gaps = [gap for itl in result["itls"] for gap in itl]
    done = [
        ttft for ttft, error in zip(result["ttfts"], result["errors"], strict=True) if not error
    ]
    return {
        **{name: result.get(name) for name in NAMES},
        "figures": {
            name: value
            for name, value in result.items()
            if isinstance(value, float) and name.endswith(("_ms", "_throughput"))
        },
        "total": len(result["ttfts"]),
        "stall_ms": round(1000 * stall, 1),
        "requests": _requests(result, stall),
        "ttft": _distribution(done),
        "itl": _distribution(gaps),
    }


def _distribution(values: Sequence[float]) -> list[float]:
    """Values in milliseconds at even steps from 0% to 100%."""
    ordered = sorted(values)
    if not ordered:
        return []
    points = min(POINTS, max(len(ordered), 2))
    percents = (100 * index / (points - 1) for index in range(points))
    return [round(1000 * percentile(ordered, percent), 3) for percent in percents]


def _requests(result: Mapping[str, Any], stall: float) -> list[dict[str, Any]]:
    """The first requests by their start, with times in seconds from the first start."""
    names = ("start_times", "ttfts", "itls", "input_lens", "output_lens", "errors")
    rows = sorted(zip(*(result[name] for name in names), strict=True), key=lambda row: row[0])
    begin = rows[0][0] if rows else 0.0
    return [
        {
            "at": round(start - begin, 4),
            "ttft": round(ttft, 4),
            "end": round(ttft + sum(itl), 4),
            "in": tokens_in,
            "out": tokens_out,
            "stalls": _stalls(ttft, itl, stall),
            "error": error[:200],
        }
        for start, ttft, itl, tokens_in, tokens_out, error in rows[:MAX_REQUESTS]
    ]


def _stalls(ttft: float, itl: Sequence[float], stall: float) -> list[list[float]]:
    """Start, relative to the request's, and length of each stall."""
    begins = accumulate(itl, initial=ttft)
    return [
        [round(t, 4), round(gap, 4)] for t, gap in zip(begins, itl, strict=False) if gap > stall
    ]
