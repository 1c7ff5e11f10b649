"""Suggestions in place of unsupported weights: a GGUF file beside them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from ..config.model_name import hub_name
from ..errors import UnsupportedWeightsError
from .gguf.choice import alternative, models_of, stem_of, type_of
from .locate import FoundModel, is_gguf


@contextmanager
def suggest_alternatives(model: str, location: FoundModel) -> Iterator[None]:
    """Extend the error for unsupported weights of ``model`` by a file of the same repository or
    folder that is loadable, judged by its name."""
    try:
        yield
    except UnsupportedWeightsError as error:
        other = _on_hub(model, location) if location.all_files else _on_disk(location.path)
        if other is None:
            raise
        raise UnsupportedWeightsError(error.problem, f"use {other}") from error


def _on_hub(model: str, location: FoundModel) -> str | None:
    """A loadable file of the repository, as a ``--model`` argument."""
    name, file = hub_name(model), alternative(location.all_files, location.path.name)
    if name is None or file is None:
        return None
    kind = type_of(file)
    if [type_of(each) for each in models_of(location.all_files)].count(kind) == 1:
        return str(replace(name, tag=kind))
    return f"{replace(name, tag=None)} --f {file}"


def _on_disk(path: Path) -> str | None:
    """A loadable file in the same folder; for a GGUF file, one of the same model by its name."""
    folder = path.parent if is_gguf(path) else path
    files = [each.name for each in folder.iterdir() if each.is_file()]
    if is_gguf(path):
        files = [each for each in files if stem_of(each) == stem_of(path.name)]
    file = alternative(files, path.name)
    return None if file is None else str(folder / file)
