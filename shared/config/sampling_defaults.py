"""Default sampling parameters of requests: the operator's, or else the model's."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..errors import UsageError, brief
from .sampling import DEFAULTS, LIMIT, MODELS_OWN, NONE, SamplingConfig
from .sampling_fields import NUMBERS

log = logging.getLogger("tandem.router")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """``parameters`` by their names in requests; ``max_tokens`` is the operator's default, and
    ``limit`` the maximum of any request."""

    parameters: Mapping[str, float] = field(default_factory=dict)
    max_tokens: int | None = None
    limit: int | None = None

    def within(self, tokens: int) -> int:
        """``tokens``, reduced to the limit if there is one."""
        return tokens if self.limit is None else min(tokens, self.limit)


NO_DEFAULTS = SamplingDefaults()


@dataclass(frozen=True, slots=True)
class OperatorDefaults:
    """The command line's own defaults, and the generation config that it names; ``None`` means the
    model's."""

    own: SamplingDefaults
    base: Mapping[str, Any] | None

    def for_model(self, generation_config: Mapping[str, Any]) -> SamplingDefaults:
        """The defaults for a model with this generation_config.json."""
        numbers = _numbers(generation_config if self.base is None else self.base)
        limit = numbers.pop(LIMIT, None)
        return replace(
            self.own,
            parameters=numbers | dict(self.own.parameters),
            limit=self.own.limit or (limit if isinstance(limit, int) and limit > 0 else None),
        )


def read_defaults(options: SamplingConfig) -> OperatorDefaults:
    """Read the options, and the file that they name. Raises ``UsageError``."""
    overrides = options.overrides
    flags = {name: getattr(options, name) for name in NUMBERS}
    flags = {name: value for name, value in flags.items() if value is not None}
    limit = overrides.pop(LIMIT, None)
    own = SamplingDefaults(parameters=overrides | flags, max_tokens=options.max_tokens, limit=limit)
    return OperatorDefaults(own, _base(options.generation_config))


def warn_of_ignored(generation_config: Mapping[str, Any], origin: str) -> None:
    """Log the sampling parameters of a generation_config.json that are not numbers."""
    usable = _numbers(generation_config)
    for name in DEFAULTS:
        if name not in usable and (value := generation_config.get(name)) is not None:
            log.warning(
                "%s: %s is %s, which is not a number, and is ignored: correct it, or set it by "
                "--override-generation-config",
                origin,
                name,
                brief(value),
            )


def _base(source: str) -> Mapping[str, Any] | None:
    if source == MODELS_OWN:
        return None
    if source == NONE:
        return {}
    base = _read(Path(source))
    warn_of_ignored(base, f"--generation-config {source}")
    return base


def _read(path: Path) -> dict[str, Any]:
    file = path / "generation_config.json" if path.is_dir() else path
    try:
        value = json.loads(file.read_text())
    except OSError as error:
        raise UsageError(
            f"--generation-config {file}: {error.strerror}; use auto, vllm, or a folder with a "
            "generation_config.json"
        ) from None
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise UsageError(f"--generation-config {file} is not a JSON object")
    return value


def _numbers(generation_config: Mapping[str, Any]) -> dict[str, float]:
    """The sampling parameters in a generation_config.json, which replace OpenAI's, as in vLLM."""
    return {
        name: value
        for name in DEFAULTS
        if isinstance(value := generation_config.get(name), (int, float))
        and not isinstance(value, bool)
        and math.isfinite(value)
    }
