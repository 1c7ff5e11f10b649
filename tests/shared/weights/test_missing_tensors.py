"""A tensor that a checkpoint lacks is told by the name that its files would have for it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tandem.shared.errors import ModelError
from tandem.shared.models.families import dense, phi3
from tandem.shared.models.parameters import parameters_of
from tandem.shared.models.spec import AttentionSpec, DecoderSpec, DenseSpec, LayerSpec
from tandem.shared.models.weight_names import WeightNames, names_of, with_short_names
from tandem.shared.weights.origins import check_complete, tensor_origins

LAYER = LayerSpec(
    attention=AttentionSpec(num_heads=2, num_kv_heads=1, head_dim=4), mlp=DenseSpec(intermediate=8)
)
SPEC = DecoderSpec(
    vocab_size=8,
    hidden_size=8,
    layers=(LAYER, LAYER),
    norm_eps=1e-6,
    tie_embeddings=False,
    max_position=16,
)
VISION = "model.language_model."
DENSE = with_short_names(dense.DENSE_WEIGHTS)


def tensors_of(names: WeightNames) -> list[str]:
    """The tensors of a whole checkpoint under the first names of a table."""
    needed, result = set(parameters_of(SPEC)), []
    for pattern, target in names.items():
        for layer in "01" if "{i}" in pattern else "":
            filled = {name.format(i=layer, j=0) for name in names_of(target)}
            if filled and filled <= needed:
                result.append(pattern.format(i=layer))
                needed -= filled
        if set(names_of(target)) & needed:
            result.append(pattern)
            needed -= set(names_of(target))
    assert not needed
    return result


def error_message(
    tensors: list[str], names: WeightNames, *missing: str, wrapped: bool = False
) -> str:
    rest = [name for name in tensors if name not in missing]
    assert len(rest) == len(tensors) - len(missing)
    origins = tensor_origins(rest, names, SPEC, "m", False, wrapped)
    with pytest.raises(ModelError) as caught:
        check_complete(origins, names, SPEC, "m", wrapped)
    return str(caught.value).partition(": ")[0]


def test_nothing_is_missing_of_a_whole_checkpoint() -> None:
    for names in (DENSE, with_short_names(phi3.WEIGHTS)):
        origins = tensor_origins(tensors_of(names), names, SPEC, "m", False)
        assert check_complete(origins, names, SPEC, "m")


def test_a_tensor_has_the_name_of_its_family() -> None:
    tensors = tensors_of(DENSE)
    missing = [f"model.layers.{layer}.mlp.up_proj.weight" for layer in (0, 1)]
    missing += ["model.norm.weight", "model.embed_tokens.weight", "lm_head.weight"]
    assert error_message(tensors, DENSE, missing[1]) == f"m lacks {missing[1]}"
    assert error_message(tensors, DENSE, *missing[:3]) == f"m lacks {', '.join(missing[:3])}"
    assert error_message(tensors, DENSE, *missing).endswith(f", {missing[1]} and 2 more tensors")


def test_one_that_is_fused_counts_once() -> None:
    names = with_short_names(phi3.WEIGHTS)
    fused = {name: to for name, to in phi3.WEIGHTS.items() if "qkv" in name or "gate_up" in name}
    missing = "model.layers.0.self_attn.qkv_proj.weight"
    assert error_message(tensors_of({**fused, **names}), names, missing) == f"m lacks {missing}"


@pytest.mark.parametrize(
    ("rename", "prefix", "wrapped"),
    [
        (lambda name: name.removeprefix("model."), "", False),
        (lambda name: name.replace("model.", VISION), VISION, True),
        (lambda name: f"language_model.{name}", "language_model.model.", True),
    ],
)
def test_it_is_named_as_those_beside_it(
    rename: Callable[[str], str], prefix: str, wrapped: bool
) -> None:
    tensors = list(map(rename, tensors_of(DENSE)))
    for name in ("layers.1.mlp.up_proj.weight", "norm.weight"):
        assert (
            error_message(tensors, DENSE, prefix + name, wrapped=wrapped)
            == f"m lacks {prefix}{name}"
        )
