"""Location of a model: from the value of ``--model`` to a folder on this machine."""

from __future__ import annotations

from pathlib import Path

from ..errors import ModelError

BUILTIN = "builtin"
_WEIGHTS = ["*.safetensors"]
_WITHOUT_WEIGHTS = ["*.json", "*.jinja", "tokenizer.model"]
# Folders of other formats, and duplicates of the weights under Mistral's own names.
_UNWANTED = ["*/*", "consolidated*.safetensors"]


def locate_model(name: str, *, weights: bool = True) -> Path:
    """Find the folder of a model: built in, on disk, or downloaded from the Hugging Face hub, with
    its weights only if ``weights``.

    Raises ``ModelError`` if there is no such folder and it cannot be downloaded.
    """
    if name == BUILTIN:
        from ..builtin_model import builtin_model_path

        return builtin_model_path()
    path = Path(name).expanduser()
    if path.suffix == ".gguf":
        raise ModelError(f"{name}: GGUF files are not supported; give a folder with safetensors")
    if path.is_file():
        if path.suffix != ".safetensors":
            raise ModelError(f"{name} is a file, but not .safetensors; give the model's folder")
        return path.parent
    if path.is_dir():
        return path
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") != 1:
        raise ModelError(
            f"model folder {name!r} does not exist; give 'builtin', a folder, or the name of a "
            f"model on the Hugging Face hub such as Qwen/Qwen3-0.6B"
        )
    return _download(name, [*_WITHOUT_WEIGHTS, *_WEIGHTS] if weights else _WITHOUT_WEIGHTS)


def _download(name: str, wanted: list[str]) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ModelError(
            f"{name!r} is not a folder, and downloading needs huggingface_hub: pip install "
            f"'tandem-llm[serve]'"
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
    """The default name of a model for clients: the last component of its path."""
    if name == BUILTIN:
        return "tandem-builtin"
    path = Path(name)
    return name if not path.exists() else path.resolve().name
