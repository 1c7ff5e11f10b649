"""The interface of a model hub."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ..config.model_name import HubName
from ..errors import ModelError
from ..text.vocabulary.files import TOKENIZER_FILES

# Configuration and tokenizer files.
DESCRIPTION = ("*.json", "*.jinja", *TOKENIZER_FILES)
# Files and folders that belong to a model; other folders have other formats of it.
_BELONGING = re.compile(r"[^/]*$|(additional_chat_templates|\d_(Pooling|Dense|LogitScore))/")


@dataclass(frozen=True, slots=True)
class Listing:
    """The files of one version of a repository, with their sizes if known."""

    sizes: Mapping[str, int | None]
    commit: str | None = None

    def belonging(self) -> list[str]:
        """The files of the model itself: of those in subfolders, only chat templates and small
        layers after the last."""
        return [file for file in self.sizes if _BELONGING.match(file)]

    def size_of(self, file: str) -> int:
        """The size of a file whose header is read. Raises ``ModelError`` if unknown."""
        size = self.sizes.get(file)
        if not size:
            raise ModelError(
                f"the hub does not tell the size of {file}, without which its header cannot be "
                f"read; download it by hf download, and give the file"
            )
        return size

    def bytes_of(self, files: Iterable[str]) -> int:
        """The total size of some files."""
        return sum(self.sizes.get(file) or 0 for file in files)


class ModelHub(Protocol):
    """A hub with repositories of models, and its local cache. All methods raise ``ModelError`` with
    the cause and the remedy."""

    def listing(self, name: HubName) -> Listing:
        """The files of a repository."""

    def cached_folder(self, name: HubName, commit: str | None = None) -> Path | None:
        """The folder of a version in the cache, even if incomplete; by default the name's
        version."""

    def download_description(self, name: HubName, listing: Listing | None) -> Path:
        """Download everything but the weights, or use the cache if there is no listing. Returns
        the folder."""

    def download(
        self, name: HubName, files: Sequence[str], listing: Listing | None, folder: Path | None
    ) -> Path:
        """Download files of the version in ``folder``, or of the name. Returns the folder."""

    def read(self, name: HubName, commit: str | None, file: str, begin: int, end: int) -> bytes:
        """Read ``file[begin:end]`` from the hub; less at the file's end."""
