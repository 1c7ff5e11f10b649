"""Options of models on a hub: their versions, and access to them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ..errors import UsageError
from .fields import option


@dataclass(frozen=True, kw_only=True)
class HubConfig:
    """Options of models on a hub. Parts of a cluster get them in the model's name and in the
    environment."""

    weight_file: str | None = option(
        None,
        "--weight-file --f",
        "A .gguf file on this machine, or with --model one in that repository or folder.",
    )
    revision: str | None = option(
        None,
        "--revision",
        "Branch, tag or commit of a model on a hub, as in OWNER/NAME@REVISION (default: its main "
        "branch).",
    )
    hf_token: str | None = option(
        None,
        "--hf-token",
        "Token of the Hugging Face hub for gated and private models, or the name of a variable "
        "that has it (default: HF_TOKEN, or that of hf auth login). Arguments are visible to other "
        "users, so pass it in the environment.",
        secret=True,
    )
    hf_token_path: str | None = option(
        None, "--hf-token-path", "File with the token of the Hugging Face hub."
    )
    modelscope: bool = option(
        False,
        "--modelscope",
        "Download models from ModelScope instead of the Hugging Face hub, as with "
        "modelscope:OWNER/NAME.",
        environment=("VLLM_USE_MODELSCOPE",),
    )

    def token(self) -> str | None:
        """The token of the Hugging Face hub, if an option has one. Raises ``UsageError``."""
        if self.hf_token is not None and self.hf_token_path is not None:
            raise UsageError("--hf-token and --hf-token-path both give the token: drop one of them")
        if self.hf_token is not None:
            token = os.environ.get(self.hf_token, self.hf_token).strip()
            if not token:
                raise UsageError("--hf-token is empty: give a token, or leave it out")
            return token
        if self.hf_token_path is None:
            return None
        try:
            token = Path(self.hf_token_path).expanduser().read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not text"
            raise UsageError(f"--hf-token-path {self.hf_token_path}: {reason}") from None
        if not token:
            raise UsageError(f"--hf-token-path {self.hf_token_path} is empty")
        return token
