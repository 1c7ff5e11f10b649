"""Reading a ``config.json`` without guessing: what is not understood is refused by name."""

from __future__ import annotations

import math
from typing import Any

from ..errors import ModelError
from .no_effect import has_no_effect
from .spec import LinearScaling, Llama3Scaling, RopeScaling, RopeSpec, YarnScaling

# No size and no factor is larger. JSON as Python reads it also has NaN, Infinity and any integer.
_LARGEST = 1 << 40


class Config:
    """A config dict that remembers which of its keys were read.

    ``ignored`` keys are treated as if the file did not have them, in its tables too.
    """

    def __init__(
        self,
        values: dict[str, Any],
        file: str = "config.json",
        ignored: frozenset[str] = frozenset(),
    ) -> None:
        self.values = {key: value for key, value in values.items() if key not in ignored}
        self.file = file
        self._ignored = ignored
        self._read: set[str] = set()

    def table(self, key: str, values: dict[str, Any]) -> Config:
        """A table inside this config, with keys of its own."""
        return Config(values, f"{self.file}: {key}", self._ignored)

    def get(self, key: str, default: Any = None) -> Any:
        """The value, or the default where the key is missing or null."""
        self._read.add(key)
        value = self.values.get(key)
        return default if value is None else value

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive integer."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= _LARGEST:
            raise self.refusal(key, value, "a positive integer")
        return value

    def count(self, key: str, default: int | None = None) -> int:
        """An integer that may be zero."""
        return 0 if self.get(key, default) == 0 else self.integer(key, default)

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number."""
        value = self.get(key, default)
        if (
            isinstance(value, bool)
            or not isinstance(value, (int, float))
            or not 0 < value < _LARGEST
        ):
            raise self.refusal(key, value, "a positive number")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """A boolean."""
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.refusal(key, value, "true or false")
        return value

    def one_of(self, key: str, supported: tuple[Any, ...], default: Any = None) -> Any:
        """A value that must be among those implemented."""
        value = self.get(key, default)
        if value not in supported:
            raise self.refusal(key, value, " or ".join(repr(item) for item in supported))
        return value

    def token_ids(self, key: str) -> tuple[int, ...]:
        """One token id, several, or none."""
        value = self.get(key, [])
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(item, int) and not isinstance(item, bool) for item in ids):
            raise self.refusal(key, value, "a token id or a list of them")
        return tuple(ids)

    def refusal(self, key: str, value: object, supported: str) -> ModelError:
        """The error for a value that is not implemented."""
        return ModelError(f"{self.file}: {key} is {value!r}; supported: {supported}")

    def finish(self) -> None:
        """Refuse a key that nothing has read, unless it is off or known to have no effect."""
        unknown = [
            key
            for key, value in self.values.items()
            if key not in self._read and not has_no_effect(key, value)
        ]
        if unknown:
            listed = ", ".join(f"{key} ({self.values[key]!r:.100})" for key in unknown)
            raise ModelError(
                f"{self.file}: {listed} is not known for this model and may change what it "
                f"computes; if it does not, add --ignore-config-keys {','.join(unknown)}"
            )


def read_rope(config: Config, head_dim: int) -> RopeSpec:
    """Both spellings: ``rope_parameters`` (transformers 5) and ``rope_theta``, ``rope_scaling``."""
    config.one_of("partial_rotary_factor", (1.0,), 1.0)
    theta = config.number("rope_theta", 10000.0)
    key = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    values = config.get(key, {})
    config.get("rope_scaling")
    if not isinstance(values, dict) or any(isinstance(v, dict) for v in values.values()):
        raise config.refusal(key, values, "one flat table for all layers")
    rope = config.table(key, values)
    theta = rope.number("rope_theta", theta)
    rope.one_of("partial_rotary_factor", (1.0,), 1.0)
    scaling = _scaling(rope, config.integer("max_position_embeddings"))
    rope.finish()
    return RopeSpec(theta=theta, head_dim=head_dim, scaling=scaling)


def _scaling(rope: Config, max_position: int) -> RopeScaling | None:
    old_name = rope.get("type", "default")
    kind = rope.get("rope_type", old_name)
    if kind == "default":
        return None
    if kind == "linear":
        return LinearScaling(factor=rope.number("factor"))
    if kind == "llama3":
        return Llama3Scaling(
            factor=rope.number("factor"),
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
            original_max_position=rope.integer("original_max_position_embeddings", max_position),
        )
    if kind == "yarn":
        return _yarn(rope, max_position)
    raise rope.refusal("rope_type", kind, "'default', 'linear', 'llama3' or 'yarn'")


def _yarn(rope: Config, max_position: int) -> YarnScaling:
    """The attention factor is a quotient of two only where the config gives both weights."""
    factor = rope.number("factor")
    if factor < 1:
        raise rope.refusal("factor", factor, "1 or more")
    over, under = (_mscale(rope, factor, key) for key in ("mscale", "mscale_all_dim"))
    default = over / under if over and under else 0.1 * math.log(factor) + 1.0
    return YarnScaling(
        factor=factor,
        original_max_position=rope.integer("original_max_position_embeddings", max_position),
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        truncate=rope.flag("truncate", True),
        attention_factor=rope.number("attention_factor", default),
        score_factor=under**2 if under else 1.0,
    )


def _mscale(rope: Config, factor: float, key: str) -> float | None:
    """How much larger queries or keys become with a context stretched by a factor, if the config
    gives that a weight (zero is none)."""
    return 0.1 * rope.number(key) * math.log(factor) + 1.0 if rope.get(key) else None


def read_window(config: Config) -> int | None:
    """``sliding_window``, where null and zero are none."""
    return config.count("sliding_window", 0) or None


def read_windows(config: Config, layers: int, default: tuple[int | None, ...]) -> list[int | None]:
    """The sliding window of each layer: ``layer_types`` where it stands, else the default."""
    kinds = config.get("layer_types")
    if kinds is None:
        return list(default)
    known = ["full_attention", "sliding_attention"]
    if (
        not isinstance(kinds, list)
        or len(kinds) != layers
        or not all(kind in known for kind in kinds)
    ):
        raise config.refusal("layer_types", kinds, f"{layers} of {known}")
    window = read_window(config)
    if window is None and "sliding_attention" in kinds:
        raise config.refusal("sliding_window", None, "an integer, as layer_types asks for one")
    return [window if kind == "sliding_attention" else None for kind in kinds]
