"""Weight names of a family: from a tensor of the checkpoint to our parameters. No torch.

In a name, ``{i}`` stands for the layer and ``{j}`` for the expert. Transforms are applied once,
when a tensor is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ..errors import ModelError


@dataclass(frozen=True)
class Split:
    """A fused tensor: the rows of several parameters, one after the other."""

    names: tuple[str, ...]


@dataclass(frozen=True)
class Alternating:
    """A fused tensor: the rows of several parameters in turn."""

    names: tuple[str, ...]


@dataclass(frozen=True)
class GroupedHeads:
    """A fused projection to q, k and v: for each KV head its query heads, the key head and the
    value head."""

    names: tuple[str, str, str]


@dataclass(frozen=True)
class AddOne:
    """A norm weight that is stored as its difference from one."""

    name: str


@dataclass(frozen=True)
class Deinterleave:
    """A projection to heads whose rows that rotate together are neighbours in the checkpoint. They
    are moved half of the rotated rows apart, as the operators expect."""

    name: str


@dataclass(frozen=True)
class Transposed:
    """A matrix that is stored as [inputs, outputs]; with ``or_not``, only if its shape does not fit
    otherwise."""

    of: Target
    or_not: bool = False


@dataclass(frozen=True)
class Stacked:
    """A tensor with an additional first dimension over experts or heads, whose parameters' names
    have ``{j}``."""

    of: Target
    over: Literal["experts", "heads", "kv_heads", "one"] = "experts"


# The name of the parameter, or a transform to it; ``None`` for an unused tensor.
Target = (
    str | Split | Alternating | GroupedHeads | AddOne | Deinterleave | Transposed | Stacked | None
)
WeightNames = dict[str, Target]

# A number as a component of a tensor's name.
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
# The prefix of all names but the head's in a model with a head.
_BODY = re.compile(r"^(model|transformer|gpt_neox)\.")
# What the name of an unknown tensor suggests about the checkpoint.
_SIGNS = (
    (
        r"(^|\.)(base_model|base_layer|lora_[AB]|lora_embedding_[AB]|lora_magnitude_vector)(\.|$)"
        r"|modules_to_save",
        "it belongs to an adapter: merge that into its base model (peft: merge_and_unload)",
    ),
    (
        r"(vision|visual|image|img|vit|audio|speech)(_\w+)?\.|multi_modal|mm_projector|image_newline"
        r"|patch_embed|^language_model\.|^model\.language_model\.|^thinker\.",
        "it belongs to a model of images or audio around a text model: use a text-only checkpoint",
    ),
    (
        r"scale(_inv|s|_2)?$|_scales?_inv$|qweight$|qzeros$|zeros?$|zero_point$|g_idx$|\.SCB$|absmax$"
        r"|quant_(map|state)|weight_(packed|shape|g_idx|format)$|\.biases$|_blocks$|bias_format$"
        r"|_quantizer|lut$",
        "the weights look quantized, but not by a method that the config describes and that is "
        "supported: use the model's bfloat16 or float16 version",
    ),
    (
        r"^(_orig_mod|module|_fsdp_wrapped_module)\.|\._(orig_mod|fsdp_wrapped_module)\.",
        "a training framework has left a prefix in the names: save the model again with "
        "transformers' save_pretrained",
    ),
    (
        r"(^|\.)(mtp|medusa|eagle|nextn|eh_proj|enorm|hnorm)\w*\.",
        "it predicts further tokens, which this family does not: use a checkpoint without it",
    ),
    (r"^(fc|midlayer|d2t|t2d)(\.|$)", "it drafts tokens for another model: use that model"),
    (
        r"(^|\.)(score|classifier|v_head|value_head|reward_head|classification_head)\.",
        "it belongs to a head that classifies or scores texts instead of generating them",
    ),
    (
        r"expert|\.(router|gate|ffn_gate_inp)\.",
        "it belongs to a mixture of experts, which this is not",
    ),
    (
        r"^(transformer|gpt_neox|decoder|encoder|bert|tok_embeddings|output|layers\.\d+\.attention)\b",
        "the names are those of another format: use a checkpoint as transformers saves it",
    ),
)


def in_layers(prefix: str, names: dict[str, str]) -> WeightNames:
    """Names of weights under ``prefix`` in every layer."""
    return {
        f"model.layers.{{i}}.{prefix}.{theirs}.weight": f"layers.{{i}}.{ours}.weight"
        for theirs, ours in names.items()
    }


def per_layer(
    names: dict[str, str], *, root: str = "model.layers.{i}.", kinds: tuple[str, ...] = ("weight",)
) -> WeightNames:
    """Names in every layer, with the ``kinds`` of parameters that each has."""
    return {
        f"{root}{theirs}.{kind}": f"layers.{{i}}.{ours}.{kind}"
        for theirs, ours in names.items()
        for kind in kinds
    }


def rotary_projections(*names: str) -> WeightNames:
    """Weights and biases of projections to heads, such as "q" and "k", that need
    ``Deinterleave``."""
    return {
        f"model.layers.{{i}}.self_attn.{name}_proj.{kind}": Deinterleave(
            f"layers.{{i}}.attention.{name}.{kind}"
        )
        for name in names
        for kind in ("weight", "bias")
    }


def stacked_experts(place: str) -> WeightNames:
    """All experts of a layer in two tensors: transposed in published text parts of image models, or
    as in the memory of transformers 5."""
    expert = "layers.{i}.mlp.experts.{j}"
    gate_up = Split((f"{expert}.gate.weight", f"{expert}.up.weight"))
    return {
        f"model.layers.{{i}}.{place}.gate_up_proj": Stacked(Transposed(gate_up, or_not=True)),
        f"model.layers.{{i}}.{place}.down_proj": Stacked(
            Transposed(f"{expert}.down.weight", or_not=True)
        ),
    }


def with_short_names(names: WeightNames) -> WeightNames:
    """The names, also without their prefix, as base models without a head are saved."""
    return names | {without_body(theirs): target for theirs, target in names.items()}


def without_body(name: str) -> str:
    """A tensor's name without the prefix that all but the head have."""
    return _BODY.sub("", name)


def pattern_of(theirs: str) -> str:
    """A tensor's name with ``{i}`` and ``{j}`` in place of numbers."""
    letters = iter("ij")
    return _NUMBER.sub(lambda number: f"{{{next(letters, '')}}}", theirs)


def numbers_in(name: str) -> list[str]:
    """The numbers that ``pattern_of`` replaces."""
    return _NUMBER.findall(name)


def target_of(theirs: str, names: WeightNames, origin: object) -> Target:
    """The parameters of a tensor of ``origin``. Numbers in its name are the layer and the expert.
    Raises ``ModelError`` if the name is unknown."""
    numbers, pattern = numbers_in(theirs), pattern_of(theirs)
    if pattern not in names:
        cause = next((cause for sign, cause in _SIGNS if re.search(sign, theirs)), "")
        raise ModelError(
            f"{origin}: tensor {theirs} is unknown for this model, and it may matter: "
            + (cause or "the architecture may be another version of this one, or a variant")
        )
    indices = dict(zip("ij", numbers, strict=False))
    # Names of stacked parameters keep their {j}.
    return rename_target(names[pattern], lambda name: name.format(**{"j": "{j}", **indices}))


def rename_target(target: Target, rename: Callable[[str], str]) -> Target:
    """The same transform with other names."""
    match target:
        case None:
            return None
        case Split(names=names) | Alternating(names=names):
            return type(target)(tuple(map(rename, names)))
        case GroupedHeads(names=(q, k, v)):
            return GroupedHeads((rename(q), rename(k), rename(v)))
        case AddOne(name=name) | Deinterleave(name=name):
            return type(target)(rename(name))
        case Transposed(of=inner, or_not=or_not):
            return Transposed(rename_target(inner, rename), or_not)
        case Stacked(of=inner, over=over):
            return Stacked(rename_target(inner, rename), over)
        case name:
            return rename(name)


def names_of(target: Target) -> tuple[str, ...]:
    """The parameters that a tensor fills."""
    match target:
        case None:
            return ()
        case Split(names=names) | Alternating(names=names) | GroupedHeads(names=names):
            return names
        case AddOne(name=name) | Deinterleave(name=name):
            return (name,)
        case Transposed(of=inner) | Stacked(of=inner):
            return names_of(inner)
        case name:
            return (name,)


def layer_of(name: str) -> int:
    """The layer that a tensor or a parameter belongs to; -1 if there is none."""
    number = _NUMBER.search(name)
    return -1 if number is None else int(number[0])
