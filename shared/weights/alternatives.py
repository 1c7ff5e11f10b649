"""What to use instead of weights that are not supported: a GGUF file beside them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from ..config.model_name import hub_name
from ..errors import UnsupportedWeightsError
from .gguf_choice import another, models_of, stem_of, type_of
from .locate import FoundModel, is_gguf


@contextmanager
def told_with_alternatives(model: str, found: FoundModel) -> Iterator[None]:
    """Have the error for unsupported weights of ``model`` name a file of the same repository or
    folder that can be loaded, as far as its name tells."""
    try:
        yield
    except UnsupportedWeightsError as error:
        other = _on_hub(model, found) if found.listed else _on_disk(found.path)
        if other is None:
            raise
        raise UnsupportedWeightsError(error.problem, f"use {other}") from error


def _on_hub(model: str, found: FoundModel) -> str | None:
    """What the command line takes for it."""
    name, file = hub_name(model), another(found.listed, found.path.name)
    if name is None or file is None:
        return None
    kind = type_of(file)
    if [type_of(each) for each in models_of(found.listed)].count(kind) == 1:
        return str(replace(name, tag=kind))
    return f"{replace(name, tag=None)} --f {file}"


def _on_disk(path: Path) -> str | None:
    """A file in the same folder; instead of a file, one of the same model by its name."""
    folder = path.parent if is_gguf(path) else path
    files = [each.name for each in folder.iterdir() if each.is_file()]
    if is_gguf(path):
        files = [each for each in files if stem_of(each) == stem_of(path.name)]
    file = another(files, path.name)
    return None if file is None else str(folder / file)
