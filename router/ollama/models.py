"""The served model in Ollama's lists."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from typing import Any

from ...shared.text.reasoning import NO_PARSER
from ..options import RouterOptions
from ..requests.body_model import BodyModel
from ..requests.reasoning_options import reasoning_of
from ..requests.tool_text import supports_tools
from ..served_model import ServedModel
from .request import LATEST, check_name

# The version of Ollama's API to report; clients check for a minimum.
API_VERSION = "0.13.0"
NEVER = "9999-12-31T23:59:59Z"
DETAILS: dict[str, Any] = {
    "parent_model": "",
    "format": "safetensors",
    "family": "tandem",
    "families": ["tandem"],
    "parameter_size": "",
    "quantization_level": "",
}


class ShowRequest(BodyModel):
    """The body of POST /api/show."""

    model: str = ""
    name: str = ""
    verbose: bool = False  # without effect: the tokenizer's vocabulary is never shown


def tagged(name: str) -> str:
    """The name with Ollama's default tag, unless it has one."""
    return name if ":" in name else name + LATEST


def entry(model: ServedModel) -> dict[str, Any]:
    """The model's entry in the list. The router does not know its size."""
    modified_at = datetime.fromtimestamp(model.created, UTC).isoformat().replace("+00:00", "Z")
    return {
        "name": tagged(model.name),
        "model": tagged(model.name),
        "modified_at": modified_at,
        "size": 0,
        "digest": hashlib.sha256(model.name.encode()).hexdigest(),
        "details": DETAILS,
    }


def running(model: ServedModel) -> dict[str, Any]:
    """The model's entry in the list of loaded models."""
    runtime = {"expires_at": NEVER, "size_vram": 0, "context_length": model.max_model_len}
    return {name: value for name, value in entry(model).items() if name != "modified_at"} | runtime


def show(
    body: Any, model: ServedModel, options: RouterOptions, ignored: set[str]
) -> dict[str, Any]:
    """The response to POST /api/show. Raises ``RequestError``."""
    request = ShowRequest.read(body, ignored)
    check_name(request.model or request.name or "?", model)
    template, tool_template = model.tokenizer.template, model.tokenizer.tool_template
    source = "" if template is None else template.source
    capabilities = ["completion"]
    has_tools = tool_template is not None and supports_tools(tool_template.source)
    if has_tools and options.enable_auto_tool_choice:
        capabilities.append("tools")
    if model.tokenizer.fill_in_middle is not None:
        capabilities.append("insert")
    if reasoning_of(model, options) != NO_PARSER:
        capabilities.append("thinking")
    return {
        "modelfile": f"FROM {model.name}\n",
        "parameters": "",
        "template": source,
        "details": DETAILS,
        "model_info": {
            "general.architecture": "tandem",
            "general.basename": model.name,
            "tandem.context_length": model.max_model_len,
        },
        "capabilities": capabilities,
        "modified_at": entry(model)["modified_at"],
    }
