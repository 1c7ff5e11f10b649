"""Reading of a ``config.json``: unsupported keys and values are rejected by name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from copy import copy
from typing import Any

from ..errors import ModelError, brief, in_line
from .no_effect import DIRECTION, SUPPORTED, has_no_effect
from .spec import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    RopeScaling,
    RopeSpec,
    YarnScaling,
)

# The largest size or factor; Python's JSON also accepts NaN, Infinity and any integer.
_LARGEST = 1 << 40
# Limits on parts, which take memory before any weight is read; far above any model's.
_MAX_PARTS = {
    "num_hidden_layers": 1 << 12,
    "num_experts": 1 << 14,
    "num_local_experts": 1 << 14,
    "n_routed_experts": 1 << 14,
}
_CAUSAL_ONLY = (
    ": tokens attend to earlier ones only, unlike in an encoder made from a decoder; for "
    "embeddings use a model that was trained so"
)
# Kinds of attention in ``layer_types``.
FULL, SLIDING = "full_attention", "sliding_attention"


class Config:
    """A config dict that remembers which of its keys were read.

    ``ignored_keys`` are treated as absent, in tables too. ``max_model_len`` is the user's limit of
    the context, if any. ``aliases`` are the family's own names of keys, ``origins`` those of a file
    other than a config.json.
    """

    def __init__(
        self,
        values: dict[str, Any],
        file: str = "config.json",
        ignored_keys: frozenset[str] = frozenset(),
        max_model_len: int | None = None,
        aliases: Mapping[str, str] | None = None,
        origins: Mapping[str, str] | None = None,
    ) -> None:
        self.values = {key: value for key, value in values.items() if key not in ignored_keys}
        self.file = file
        self.max_model_len = max_model_len
        self._ignored_keys = ignored_keys
        self._aliases = aliases or {}
        self._origins = origins or {}
        self._read: set[str] = set()

    def _fresh_copy(self) -> Config:
        config = copy(self)
        config._read = set()
        return config

    def with_aliases(self, aliases: Mapping[str, str]) -> Config:
        """A fresh copy for a family with other names for some keys."""
        config = self._fresh_copy()
        config._aliases = aliases
        return config

    def without(self, keys: frozenset[str]) -> Config:
        """A fresh copy without some keys."""
        config = self._fresh_copy()
        config._ignored_keys = self._ignored_keys | keys
        config.values = {key: value for key, value in self.values.items() if key not in keys}
        return config

    def table(self, key: str, values: dict[str, Any]) -> Config:
        """A table inside this config, with its own keys."""
        return Config(
            values, f"{self.file}: {in_line(key)}", self._ignored_keys, self.max_model_len
        )

    def get(self, key: str, default: Any = None) -> Any:
        """The value, or the default if the key is missing or null."""
        key = self._name(key)
        self._read.add(key)
        value = self.values.get(key)
        return default if value is None else value

    def _name(self, key: str) -> str:
        """The config's own name of a key."""
        alias = self._aliases.get(key, key)
        return alias if alias in self.values or key not in self.values else key

    def integer(self, key: str, default: int | None = None, *, at_most: int | None = None) -> int:
        """A positive integer, up to ``at_most`` if given."""
        value = self.get(key, default)
        limit = _MAX_PARTS.get(key, _LARGEST)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= limit:
            huge = isinstance(value, int) and value > limit
            supported = "a positive integer" + (
                f" up to {limit}" if huge or limit < _LARGEST else ""
            )
            raise self.refusal(key, value, supported)
        if at_most is not None and value > at_most:
            raise self.refusal(key, value, f"at most {at_most}")
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

    def optional_number(self, key: str, default: float | None = None) -> float | None:
        """A positive number; ``None`` if it is null, the default if the key is missing."""
        if self.get(key) is None:
            return None if key in self.values else default
        return self.number(key)

    def flag(self, key: str, default: bool = False) -> bool:
        """A boolean. Null is rejected if the default is true, since other readers take it as
        false."""
        value = self.get(key, None if key in self.values and default else default)
        if not isinstance(value, bool):
            raise self.refusal(key, value, "true or false")
        return value

    def one_of(self, key: str, supported: tuple[Any, ...], default: Any = None) -> Any:
        """A value that must be among the supported ones."""
        value = self.get(key, default)
        if value not in supported:
            raise self.refusal(key, value, " or ".join(repr(item) for item in supported))
        return supported[supported.index(value)]  # 4 where a file has 4.0

    def token_ids(self, key: str) -> tuple[int, ...]:
        """One token id, several, or none."""
        return self._integers(key, "a token id or a list of them")

    def layers(self, key: str) -> tuple[int, ...]:
        """Indices of layers, if any."""
        return self._integers(key, "a list of indices of layers")

    def _integers(self, key: str, supported: str) -> tuple[int, ...]:
        value = self.get(key, [])
        items = value if isinstance(value, list) else [value]
        if not all(isinstance(item, int) and not isinstance(item, bool) for item in items):
            raise self.refusal(key, value, supported)
        return tuple(items)

    def factors(self, key: str, count: int) -> tuple[float, ...]:
        """A list of positive numbers."""
        value = self.get(key)
        if not isinstance(value, list) or len(value) != count:
            raise self.refusal(key, value, f"a list of {count} numbers")
        table = self.table(key, {str(index): item for index, item in enumerate(value)})
        return tuple(table.number(str(index)) for index in range(count))

    def matrix(self, key: str) -> tuple[int, int]:
        """A list of two positive integers: outputs and inputs."""
        value = self.get(key)
        if not isinstance(value, list) or len(value) != 2:
            raise self.refusal(key, value, "a list of two sizes, such as [128, 128]")
        sizes = self.table(key, {"outputs": value[0], "inputs": value[1]})
        return sizes.integer("outputs"), sizes.integer("inputs")

    def refusal(self, key: str, value: object, supported: str) -> ModelError:
        """The error for an unsupported value."""
        name = self._name(key)
        text = brief(value) if value is not None else "null" if name in self.values else "missing"
        origin = self._origins.get(name) or self._origins.get(key)
        place = name if origin is None else f"{origin} ({name} in a config.json)"
        return ModelError(f"{self.file}: {place} is {text}; supported: {supported}")

    def finish(self) -> None:
        """Reject keys that were not read, unless they are known to have no effect."""
        unknown = [
            key
            for key, value in self.values.items()
            if key not in self._read and not has_no_effect(key, value)
        ]
        for key in unknown:
            if key in SUPPORTED:
                supported = repr(SUPPORTED[key])
                if key in DIRECTION:
                    supported += _CAUSAL_ONLY
                raise self.refusal(key, self.values[key], supported)
        if unknown:
            keys = ", ".join(f"{key} ({self.values[key]!r:.100})" for key in unknown)
            raise ModelError(
                f"{self.file}: {keys} is unknown for this model and may change what it "
                f"computes; if it does not, add --ignore-config-keys {','.join(unknown)}"
            )


# Names of the context length in other config formats.
_OTHER_LENGTHS = (
    *("max_sequence_length", "max_seq_len", "max_seq_length", "seq_length", "n_positions", "n_ctx"),
    "model_max_length",
)


def read_max_position(config: Config) -> int:
    """``max_position_embeddings``, which has no default."""
    key = "max_position_embeddings"
    if config.get(key) is None:
        for other in _OTHER_LENGTHS:
            if (value := config.values.get(other)) is not None:
                raise ModelError(
                    f"{config.file}: {key} is missing; if {other}, which is {brief(value)}, is the "
                    f"context that the model was trained for, enter it as {key} too"
                )
    return config.integer(key)


def read_rope(
    config: Config,
    head_dim: int,
    *,
    partial: bool = False,
    part: float = 1.0,
    theta: float = 10000.0,
    theta_key: str = "rope_theta",
    part_key: str = "partial_rotary_factor",
) -> RopeSpec:
    """Read rope in both spellings: ``rope_parameters`` (transformers 5), and ``rope_theta`` with
    ``rope_scaling``.

    ``partial`` allows partly rotated heads; ``theta`` and ``part`` are the family's defaults,
    ``theta_key`` and ``part_key`` its older names for both.
    """
    newer, older = config.get("rope_parameters"), config.get("rope_scaling")
    key = "rope_parameters" if newer else "rope_scaling"
    values = config.get(key, {})
    if newer and older and _without_theta(newer) != _without_theta(older):
        raise config.refusal(
            "rope_scaling", older, "none beside rope_parameters; enter it there instead"
        )
    if not isinstance(values, dict) or any(isinstance(v, dict) for v in values.values()):
        raise config.refusal(key, values, "one flat table for all layers")
    theta = config.number(theta_key, theta)
    part = _rotary_part(config, partial, part, part_key)
    return read_rope_table(config, key, values, head_dim, theta=theta, partial=partial, part=part)


def _without_theta(table: Any) -> Any:
    """A rope table without theta, and with the newer name of its type."""
    if not isinstance(table, dict):
        return table
    result = {key: value for key, value in table.items() if value is not None}
    result.pop("rope_theta", None)
    kind = result.pop("type", "default")
    return {"rope_type": kind, **result}


def read_rope_table(
    config: Config,
    key: str,
    values: dict[str, Any],
    head_dim: int,
    *,
    theta: float,
    partial: bool = False,
    part: float = 1.0,
) -> RopeSpec:
    """Read the rope table ``key`` of a config, with defaults for missing keys."""
    rope = config.table(key, values)
    theta = rope.number("rope_theta", theta)
    kind = rope.get("rope_type", rope.get("type", "default"))
    part = _rotary_part(rope, partial, part)
    dim = head_dim if kind == "proportional" else int(head_dim * part)
    if dim < 2 or dim % 2:
        raise config.refusal(key, values, f"an even part of {head_dim} dimensions")
    scaling = _scaling(kind, rope, config, dim, part)
    if kind == "dynamic":
        theta = _dynamic_theta(rope, config, theta, dim)
    rope.get("finetuned")  # about training
    rope.get("llama_4_scaling_beta")  # belongs to attention, not to the rotation
    rope.finish()
    return RopeSpec(theta=theta, dim=dim, scaling=scaling)


def _rotary_part(
    config: Config, partial: bool, default: float, key: str = "partial_rotary_factor"
) -> float:
    if not partial:
        config.one_of(key, (1.0,), default)
        return 1.0
    part = config.number(key, default)
    if part > 1:
        raise config.refusal(key, part, "at most 1")
    return part


def _dynamic_theta(rope: Config, config: Config, theta: float, dim: int) -> float:
    """Theta after dynamic NTK scaling: by a fixed ``alpha``, or for a context longer than the
    original one.

    transformers recomputes it in each step, for the longest sequence so far. Cached keys of a
    sequence must have equal factors, so the longest context that the user allows counts here.
    """
    exponent = dim / max(1, dim - 2)
    if rope.get("alpha"):
        return theta * math.pow(rope.number("alpha"), exponent)
    scaling = _dynamic(rope, config)
    stretch = max(1.0, (config.max_model_len or 0) / scaling.original_max_position)
    return theta * math.pow(scaling.factor * stretch - (scaling.factor - 1), exponent)


def _dynamic(rope: Config, config: Config) -> DynamicScaling:
    original = rope.integer("original_max_position_embeddings", read_max_position(config))
    factor = rope.number("factor")
    if factor < 1:
        raise rope.refusal("factor", factor, "1 or more")
    return DynamicScaling(factor=factor, original_max_position=original)


def _scaling(
    kind: object, rope: Config, config: Config, dim: int, part: float
) -> RopeScaling | None:
    max_position = read_max_position(config)
    match kind:
        case "default":
            return None
        case "dynamic":
            if rope.get("alpha"):
                for key in ("factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow"):
                    rope.get(key)  # ignored: alpha alone decides
                return None
            return _dynamic(rope, config)
        case "proportional":
            factor = rope.number("factor", 1.0)
            return ProportionalScaling(rotated=int(part * dim // 2), factor=factor)
        case "linear":
            return LinearScaling(factor=rope.number("factor"))
        case "llama3":
            original = rope.integer("original_max_position_embeddings", max_position)
            return Llama3Scaling(
                factor=rope.number("factor"),
                low_freq_factor=rope.number("low_freq_factor"),
                high_freq_factor=rope.number("high_freq_factor"),
                original_max_position=original,
            )
        case "yarn":
            return _yarn(rope, max_position)
        case "longrope" | "su":
            return _longrope(rope, config, dim, max_position)
    raise rope.refusal(
        "rope_type",
        kind,
        "'default', 'linear', 'dynamic', 'llama3', 'yarn', 'longrope', 'proportional' or 'mrope'",
    )


def _longrope(rope: Config, config: Config, dim: int, max_position: int) -> LongRopeScaling:
    """The factors for short contexts if no context can exceed the original one, else those for long
    ones.

    transformers chooses in each step, so a sequence that grows beyond the original context
    continues from keys with other factors.
    """
    short, long = (rope.factors(f"{name}_factor", dim // 2) for name in ("short", "long"))
    default = config.get("original_max_position_embeddings")
    original = rope.integer("original_max_position_embeddings", default)
    stretch = rope.number("factor", max_position / original)
    default_factor = 1.0
    if stretch > 1 and original > 1:
        default_factor = math.sqrt(1 + math.log(stretch) / math.log(original))
    longest = min(max_position, config.max_model_len or max_position)
    return LongRopeScaling(
        factors=long if longest > original else short,
        attention_factor=rope.number("attention_factor", default_factor),
    )


def _yarn(rope: Config, max_position: int) -> YarnScaling:
    """YaRN scaling. The attention factor is a quotient only if the config has both ``mscale`` keys.

    YaRN's own code has two more factors. ``attn_factor`` multiplies the attention factor; published
    configs have it, but neither transformers nor newer versions of vLLM apply it.
    ``extrapolation_factor`` is the weight of the ramp, which both take as 1.
    """
    factor = rope.number("factor")
    if factor < 1:
        raise rope.refusal("factor", factor, "1 or more")
    rope.get("attn_factor")
    rope.one_of("extrapolation_factor", (1.0,), 1.0)
    rope.get("max_position_embeddings")  # Ministral 3 repeats the config's here
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
    """The growth of queries or keys with the context's stretch; ``None`` without a weight, or with
    zero."""
    return 0.1 * rope.number(key) * math.log(factor) + 1.0 if rope.get(key) else None


def read_window(config: Config, default: int = 0) -> int | None:
    """``sliding_window``; null and zero mean none, ``default`` is for configs without the key."""
    key = "sliding_window"
    return config.count(key, 0 if key in config.values else default) or None


def read_windows(config: Config, layers: int, default: tuple[int | None, ...]) -> list[int | None]:
    """The sliding window of each layer, by ``layer_types`` if the config has it."""
    kinds = read_layer_types(config, layers)
    if kinds is None:
        return list(default)
    window = read_window(config)
    if window is None and SLIDING in kinds:
        raise config.refusal("sliding_window", None, "an integer, as layer_types asks for one")
    return [window if kind == SLIDING else None for kind in kinds]


def read_full_attention(config: Config) -> list[int | None]:
    """No window in any layer. Keys of families with windows are accepted if they say so."""
    layers = config.integer("num_hidden_layers")
    if config.get("use_sliding_window") is not False:
        config.one_of("sliding_window", (None, 0))
    elif config.get("sliding_window") is not None:
        config.count("sliding_window")
    kinds = read_layer_types(config, layers)
    if kinds is not None and SLIDING in kinds:
        raise config.refusal("layer_types", kinds, f"{FULL!r} only, for this family")
    return [None] * layers


def read_layer_types(config: Config, layers: int) -> list[str] | None:
    """The kind of attention of each layer, or ``None`` if the config has no ``layer_types``."""
    kinds = config.get("layer_types")
    if kinds is None:
        return None
    if (
        not isinstance(kinds, list)
        or len(kinds) != layers
        or not all(kind in (FULL, SLIDING) for kind in kinds)
    ):
        raise config.refusal("layer_types", kinds, f"{layers} of {[FULL, SLIDING]}")
    return kinds
