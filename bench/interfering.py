"""`tandem bench interference`: rounds of attacks on a URL, and their medians."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Mapping
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from .client.api_server import ApiServer
from .datasets.random_prompts import find_prompt_maker
from .datasets.text_tokens import LocalTokens
from .interference import Attack, Scene, attack, summary
from .progress_bar import progress_bar
from .report.result_file import check_writable, write_result
from .report.result_table import WIDTH, heading, line
from .serving import server_of


def run_interference(values: Mapping[str, Any]) -> None:
    """Run the command. Raises ``UsageError`` and ``BenchmarkError``."""
    scene = Scene(
        victims=values["victims"],
        prompt_tokens=values["prompt_tokens"],
        victim_prompt_tokens=values["victim_prompt_tokens"],
        victim_tokens=values["victim_tokens"],
        alone_seconds=values["alone_seconds"],
    )
    check_writable(values["output_json"])
    model, attacks = asyncio.run(_rounds(values, scene))
    result = {
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        "backend": values["backend"],
        "model_id": model,
        "victims": scene.victims,
        "prompt_tokens": attacks[-1].prompt_tokens,
        **summary(attacks),
    }
    click.echo(json.dumps(result, indent=2) if values["as_json"] else _table(result))
    if values["output_json"]:
        write_result(Path(values["output_json"]), result)
    if len(attacks) < values["rounds"]:
        raise KeyboardInterrupt


async def _rounds(values: Mapping[str, Any], scene: Scene) -> tuple[str, list[Attack]]:
    server = server_of(values)
    with closing(server.client):
        return await _rounds_on(server, values, scene)


async def _rounds_on(
    server: ApiServer, values: Mapping[str, Any], scene: Scene
) -> tuple[str, list[Attack]]:
    server.model = server.model or await server.first_model()
    local = LocalTokens.load(values["tokenizer"]) if values["tokenizer"] else None
    prompts = await find_prompt_maker(server, local)
    seed = secrets.token_hex(8) if values["seed"] is None else values["seed"]
    warm_ups, attacks = values["num_warmups"], []
    total = warm_ups + values["rounds"]
    with progress_bar("Rounds", total, hidden=values["disable_tqdm"]) as advance:
        for number in range(total):
            try:
                attacks.append(await attack(server, prompts, f"{seed}/round {number}", scene))
            except asyncio.CancelledError:  # Ctrl-C
                if len(attacks) <= warm_ups:
                    raise
                break
            advance()
    return server.model, attacks[warm_ups:]


def _table(result: Mapping[str, Any]) -> str:
    return "\n".join(
        [
            heading(" Interference "),
            line("Victims:", result["victims"]),
            line("Long prompt (tokens):", result["prompt_tokens"]),
            line("Rounds (medians follow):", len(result["rounds"])),
            heading("Worst victim", "-"),
            line("Own speed (tok/s):", result["victim_speed"]),
            line("Share kept during attack (%):", 100 * result["share_kept"]),
            line("Longest gap before attack (ms):", result["longest_gap_before_ms"]),
            line("Longest gap during attack (ms):", result["longest_gap_ms"]),
            heading("Long prompt", "-"),
            line("TTFT alone (ms):", result["attacker_ttft_alone_ms"]),
            line("TTFT with victims (ms):", result["attacker_ttft_ms"]),
            line("TTFT with victims / alone:", result["attacker_ttft_over_alone"]),
            "=" * WIDTH,
        ]
    )
