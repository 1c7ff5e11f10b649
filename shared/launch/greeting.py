"""What ``tandem serve`` prints once it serves: where, and what to try."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from shlex import quote

from ..config import RouterConfig
from ..config.fields import served_names
from ..weights.locate import display_name

# Long enough to be prefilled by a prefill node, and a few seconds' work for two cores. The built-in
# model answers it rightly, and so does SmolLM2.
LONG_PROMPT = (
    '(echo "The code of the green door is 417."; seq 200; '
    'echo "What is the code of the green door?")'
)


def greeting(
    address: str, registry: str, front: RouterConfig, logs: Path, *, prefill_nodes: bool
) -> list[str]:
    """The lines, for a router of which the ``front`` has the options."""
    tandem, url = _program(), quote(address)  # an address of IPv6 has brackets
    name = next(iter(served_names(front.served_model_name)), display_name(front.model or ""))
    body = {
        "model": name,
        "messages": [{"role": "user", "content": "What is 7 plus 5?"}],
        "max_tokens": 100,
        "stream": True,
    }
    # Never the key itself.
    header, variable = "", ""
    if front.asks_for_keys:
        header, variable = " -H 'authorization: Bearer KEY'", "TANDEM_API_KEY=KEY "
    lines = [
        f"Tandem is ready: {address}  (chat page, and OpenAI's API under /v1)",
        f"Try: curl -N {url}/v1/chat/completions{header} -H 'content-type: application/json' "
        f"-d {quote(json.dumps(body))}",
    ]
    if prefill_nodes:
        lines.append(
            f"Prefill apart, as {address}/cluster shows: {LONG_PROMPT} | "
            f"{variable}{tandem} complete --chat --max-tokens 50 --url {url}"
        )
    return [
        *lines,
        f"Logs: {logs}. Ctrl-C ends everything.",
        f"Parts: {tandem} nodes --router {quote(registry)}",
        f"Check: {tandem} doctor {url} --router {quote(registry)}",
        f"Other nodes join at {registry} (--registry-port fixes the port)",
    ]


def _program() -> str:
    """The command as this user's shell finds it."""
    if shutil.which("tandem"):
        return "tandem"
    own = Path(sys.argv[0])
    return f"{sys.executable} -m tandem" if own.name == "__main__.py" else quote(str(own))
