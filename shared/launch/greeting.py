"""The lines that ``tandem serve`` prints once it serves: its addresses, and commands to try."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from shlex import quote
from typing import Any

from ..config import RouterConfig
from ..config.fields import served_names
from ..scoring import ROUTES, Scoring
from ..weights.locate import display_name

# Long enough for a prefill node, and a few seconds' work for two cores. The built-in model and
# SmolLM2 both answer it correctly.
LONG_PROMPT = (
    '(echo "The code of the green door is 417."; seq 200; '
    'echo "What is the code of the green door?")'
)

_CHAT = {"messages": [{"role": "user", "content": "What is 7 plus 5?"}]}
_TEXTS = ["Berlin has 3.7 million inhabitants.", "Berlin is known for its museums."]
# Of a request to a model that is not for chats.
_BODIES: dict[Scoring, dict[str, Any]] = {
    "pair": {"query": "How many people live in Berlin?", "documents": _TEXTS},
    "labels": {"input": _TEXTS},
    "vectors": {"input": _TEXTS},
}


def greeting(
    address: str,
    registries: list[str],
    front: RouterConfig,
    logs: Path,
    scoring: Scoring | None,
    *,
    prefill_nodes: bool,
) -> list[str]:
    """The lines for a router with the options ``front``. ``scoring`` is set if the model is not for
    chats."""
    tandem, url = _program(), quote(address)  # an address of IPv6 has brackets
    name = next(iter(served_names(front.served_model_name)), display_name(front.model or ""))
    chats = ("/v1/chat/completions", _CHAT | {"max_tokens": 100, "stream": True})
    route, body = chats if scoring is None else (ROUTES[scoring], _BODIES[scoring])
    # The key itself is never printed.
    header, variable = "", ""
    if front.requires_key:
        header, variable = " -H 'authorization: Bearer KEY'", "TANDEM_API_KEY=KEY "
    page = "chat page, and " if scoring is None else ""
    stream = " -N" if scoring is None else ""
    lines = [
        f"Tandem is ready: {address}  ({page}OpenAI's API under /v1)",
        f"Try: curl{stream} {url}{route}{header} -H 'content-type: application/json' "
        f"-d {quote(json.dumps({'model': name, **body}))}",
    ]
    if prefill_nodes and scoring is None:
        lines.append(
            f"Prefill apart, as {address}/cluster shows: {LONG_PROMPT} | "
            f"{variable}{tandem} complete --chat --temperature 0 --max-tokens 50 --url {url}"
        )
    return [
        *lines,
        f"Logs: {logs}. Ctrl-C ends everything.",
        f"Parts: {tandem} nodes --router {quote(registries[0])}",
        f"Check: {tandem} doctor {url} --router {quote(registries[0])}",
        f"Other nodes join at {','.join(registries)} (--registry-port fixes the port)",
    ]


def _program() -> str:
    """The command by which this user's shell finds Tandem."""
    if shutil.which("tandem"):
        return "tandem"
    own = Path(sys.argv[0])
    return f"{sys.executable} -m tandem" if own.name == "__main__.py" else quote(str(own))
