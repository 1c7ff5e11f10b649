"""Invalid requests get the answers that ``bad_inputs.json`` lists."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tandem.tests.router.bad_inputs import TABLE, body_answers, http_answers


def differences(kept: dict[str, Any], now: dict[str, Any]) -> list[str]:
    return [
        f"{name}: {kept.get(name)} -> {now.get(name)}"
        for name in kept | now
        if kept.get(name) != now.get(name)
    ]


async def test_answers_over_http_are_those_of_the_table(tmp_path: Path) -> None:
    kept = json.loads(TABLE.read_text())["http"]
    assert differences(kept, await http_answers(tmp_path)) == []


def test_answers_to_bodies_are_those_of_the_table(tmp_path: Path) -> None:
    kept = json.loads(TABLE.read_text())["bodies"]
    assert differences(kept, body_answers(tmp_path)) == []
