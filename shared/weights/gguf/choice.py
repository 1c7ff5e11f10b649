"""Choice of a GGUF file in a repository or a folder."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from difflib import get_close_matches

from ...errors import ModelError
from .tensor_types import TENSOR_TYPES

# The first of these that exists and is loadable is the default; Q4_K_M is llama.cpp's too.
_PREFERRED = (
    *("Q4_K_M", "Q4_K_S", "Q5_K_M", "Q5_K_S", "Q4_0", "Q4_1", "Q6_K", "Q8_0", "IQ4_XS", "IQ4_NL"),
    *("Q5_0", "Q5_1", "Q3_K_L", "Q3_K_M", "Q3_K_S", "Q2_K", "MXFP4", "BF16", "F16", "F32"),
)
_TYPE = re.compile(
    r"(?<![A-Za-z0-9])((?:UD-)?(?:I?Q\d(?:_[A-Z0-9]+)*|TQ\d_\d|MXFP4(?:_MOE)?|BF16|FP?16|FP?32))"
    r"(?![A-Za-z0-9])",
    re.IGNORECASE,
)
_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$", re.IGNORECASE)
# Files that are not a whole model.
NO_MODEL = re.compile(
    r"mmproj|imatrix|lora|adapter|ggml-vocab|control-?vector|(^|[-_.])mtp([-_.]|$)", re.IGNORECASE
)
# Values of --isq that match the name of a quantisation.
_IN_SITU = re.compile("q[2-6]k|q[48]_0")
_MAX_SHOWN = 12


def models_of(files: Iterable[str]) -> dict[str, list[str]]:
    """The models among ``files``: the first part's name to all parts in order."""
    models: dict[str, list[str]] = {}
    for file in sorted(files):
        if file.lower().endswith(".gguf") and not NO_MODEL.search(file.rpartition("/")[2]):
            models.setdefault(_PART.sub("", file), []).append(file)
    return {parts[0]: parts for parts in models.values()}


def type_of(file: str) -> str:
    """The quantisation in a file's name, such as ``Q4_K_M``; empty if there is none."""
    stem = _PART.sub("", file.rpartition("/")[2]).removesuffix(".gguf")
    types = _TYPE.findall(stem)
    return re.sub("^FP", "F", types[-1].upper()) if types else ""


def choose(files: Collection[str], place: str, tag: str | None) -> list[str]:
    """The parts of the model that ``tag`` names by file or quantisation, or of the default. Raises
    ``ModelError``, which lists the choices."""
    if tag is not None and tag.lower().endswith(".gguf"):
        return whole(_parts_of_file(files, place, tag), place)
    models = models_of(files)
    if not models:
        ggufs = sorted(file for file in files if file.lower().endswith(".gguf"))
        raise ModelError(
            f"{place} has no GGUF file of a model"
            + (f": {ggufs[0]} is not a whole model, by its name" if ggufs else "")
            + (_without_tag(files, tag) if tag is not None else "")
        )
    types: dict[str, list[str]] = {}
    for first in models:
        types.setdefault(type_of(first), []).append(first)
    kind = _type_of_tag(types, place, tag, models)
    if len(types[kind]) > 1:
        raise ModelError(
            f"{place} has several GGUF files{f' in {kind}' if kind else ''}: "
            f"{_list(types[kind])}; give one of them by --f"
        )
    return whole(models[types[kind][0]], place)


def _without_tag(files: Iterable[str], tag: str) -> str:
    """Advice about a tag for a model in safetensors."""
    if not any(file.endswith(".safetensors") for file in files):
        return ""
    kind = re.sub("_K.*", "K", tag.upper()).lower()
    or_quantised = f", and serve it with --isq {kind}" if _IN_SITU.fullmatch(kind) else ""
    return f"; its weights are safetensors: leave out {tag!r}{or_quantised}"


def whole(parts: list[str], place: str) -> list[str]:
    """Return the parts of a model. Raises ``ModelError`` if some are missing."""
    matches = [match for part in parts if (match := _PART.search(part))]
    if not matches:
        return parts
    count = int(matches[0][2])
    missing = sorted(set(range(1, count + 1)) - {int(match[1]) for match in matches})
    if missing:
        stem = parts[0][: matches[0].start()]
        raise ModelError(
            f"{place} lacks {stem}-{missing[0]:05}-of-{count:05}.gguf, a part of the model; "
            f"download it too"
        )
    return parts


def loadable(kind: str) -> bool:
    """True if a quantisation is loadable, judged by its name."""
    base = re.sub("^UD-|_(XS|XXS|NL|S|M|L|XL|MOE)$", "", kind)
    supported = {each.name for each in TENSOR_TYPES.values()}
    return bool({kind, base} & supported)


def alternative(files: Iterable[str], rejected: str = "") -> str | None:
    """The preferred loadable file of a model in place of the file ``rejected``: if possible,
    another quantisation of the same model."""
    candidates = [
        first
        for first in models_of(files)
        if type_of(first) != type_of(rejected) and loadable(type_of(first))
    ]
    best = sorted(candidates, key=_preference)
    same = [each for each in best if stem_of(each) == stem_of(rejected)]
    return next(iter(same or best), None)


def _preference(file: str) -> int:
    kind = type_of(file)
    return _PREFERRED.index(kind) if kind in _PREFERRED else len(_PREFERRED)


def stem_of(file: str) -> str:
    """The name of a model without its quantisation."""
    return _TYPE.sub("", _PART.sub("", file.rpartition("/")[2]).removesuffix(".gguf")).lower()


def _type_of_tag(
    types: dict[str, list[str]], place: str, tag: str | None, models: dict[str, list[str]]
) -> str:
    """The member of ``types`` that a tag names, or the default."""
    if tag is not None:
        name = re.sub("^FP", "F", tag.upper())
        for kind in (name, f"UD-{name}"):
            if kind in types:
                return kind
        near = get_close_matches(name, types, 1)
        raise ModelError(
            f"{place} has no GGUF file in {tag}; it has {_list(filter(None, types))}"
            + (f"; did you mean {near[0]}?" if near else "")
        )
    preferred = [kind for kind in _PREFERRED if kind in types and loadable(kind)]
    others = sorted(kind for kind in types if loadable(kind))
    if best := [*preferred, *others][:1]:
        return best[0]
    if len(types) == 1:
        return next(iter(types))  # its header says what is in it
    raise ModelError(
        f"{place} has GGUF files, none of which is of a supported type by its name "
        f"({_list(types)}); supported: {', '.join(sorted(k.name for k in TENSOR_TYPES.values()))}"
    )


def _parts_of_file(files: Collection[str], place: str, name: str) -> list[str]:
    """The parts of the file with this name, in any folder. Raises ``ModelError`` if ambiguous."""
    matches = [name] if name in files else [f for f in files if f.rpartition("/")[2] == name]
    if len(matches) != 1:
        ggufs = [file for file in files if file.lower().endswith(".gguf")]
        near = get_close_matches(name, ggufs, 3, 0.4) or ggufs
        several = f"has several {name!r}" if matches else f"has no file {name!r}"
        names = _list(matches or near)
        raise ModelError(
            f"{place} {several}"
            + (f"; it has {names}" if names else ", and no GGUF file at all")
            + ("" if names else _without_tag(files, name))
        )
    stem = _PART.sub("", matches[0])
    if stem == matches[0]:
        return matches
    return sorted(file for file in files if _PART.search(file) and _PART.sub("", file) == stem)


def _list(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = len(ordered) - _MAX_SHOWN
    return ", ".join(ordered[:_MAX_SHOWN]) + (f" and {more} more" if more > 0 else "")
