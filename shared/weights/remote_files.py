"""What is asked of a hub of models."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ..config.model_name import HubName
from ..errors import ModelError
from ..text.vocabulary.files import TOKENIZER_FILES

# Everything that says what a model is, and what its texts are.
DESCRIPTION = ("*.json", "*.jinja", *TOKENIZER_FILES)
# The folders that belong to a model; others have other formats of it.
_BELONGING = re.compile(r"[^/]*$|(additional_chat_templates|\d_(Pooling|Dense|LogitScore))/")


@dataclass(frozen=True, slots=True)
class Listing:
    """The files of one version of a repository, and their sizes where those are known."""

    sizes: Mapping[str, int | None]
    commit: str | None = None

    def belonging(self) -> list[str]:
        """The files that a model folder has: of those in folders only what describes it,
        and small layers after its last."""
        return [file for file in self.sizes if _BELONGING.match(file)]

    def size_of(self, file: str) -> int:
        """The size of a file whose header is read. Raises ``ModelError`` if it is not known."""
        size = self.sizes.get(file)
        if not size:
            raise ModelError(
                f"the hub does not tell the size of {file}, without which its header cannot be "
                f"read; download it by hf download, and give the file"
            )
        return size

    def bytes_of(self, files: Iterable[str]) -> int:
        """The size of some files together."""
        return sum(self.sizes.get(file) or 0 for file in files)


class ModelHub(Protocol):
    """A place on the network with repositories of models, and its cache on this machine. All
    methods raise ``ModelError`` with the cause, and with what to do."""

    def listing(self, name: HubName) -> Listing:
        """The files of a repository."""

    def cached(self, name: HubName, commit: str | None = None) -> Path | None:
        """The folder of a version in the cache, whole or not; by default that of the name."""

    def download_description(self, name: HubName, listing: Listing | None) -> Path:
        """Download everything but the weights. Without a listing, which needs the hub, what is in
        the cache will do. Returns the folder."""

    def download(
        self, name: HubName, files: Sequence[str], listing: Listing | None, folder: Path | None
    ) -> Path:
        """Download files of the version in ``folder``, or of the name's. Returns the folder."""

    def read(self, name: HubName, commit: str | None, file: str, begin: int, end: int) -> bytes:
        """Read ``file[begin:end]`` from the hub; less at the file's end."""
