"""Counts of prompts by where they were prefilled, since the start and lately."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from tandem.shared.telemetry.prompt_metrics import (
    RECENT,
    RECENT_SECONDS,
    STEP_SECONDS,
    PromptMetrics,
)


def test_recent_prompts_are_forgotten_and_all_are_not() -> None:
    now = [0.0]
    registry = CollectorRegistry()
    prompts = PromptMetrics(registry, lambda: now[0])

    def value(name: str, where: str, reason: str) -> float | None:
        return registry.get_sample_value(name, {"where": where, "reason": reason})

    prompts.count("remote")
    for _ in range(3):
        now[0] += STEP_SECONDS
        prompts.count("local", "below threshold")
    assert value(RECENT, "remote", "") == 1
    assert value(RECENT, "local", "below threshold") == 3
    now[0] = RECENT_SECONDS + STEP_SECONDS
    assert value(RECENT, "remote", "") is None
    assert value(RECENT, "local", "below threshold") == 2
    assert value("tandem_prompts_total", "remote", "") == 1
    assert value("tandem_prompts_total", "local", "below threshold") == 3
