"""Downloads of large files that outlive their process.

The hub's client takes up a connection that breaks, but keeps nothing of a file when its process
ends. So large files are put into its cache from here, by its own transfer, unless they come from
the hub's newer storage, whose client goes by chunks of its own. The client finds them there by
their hashes, as it does files of other versions.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from ..errors import ModelError

ENDING = ".resumable.incomplete"
# Smaller ones are downloaded again in a moment.
LARGE = 64 << 20
_SHA256 = 64


def fetch(repository: str, revision: str | None, files: Sequence[str], blobs: Path) -> None:
    """Download large files into a cache. Raises the client's errors, and
    ``ModelError``; what has come until then is kept."""
    for file in files:  # in turn, in this thread, where Ctrl-C ends one at once
        _fetch(repository, revision, file, blobs)


def _fetch(repository: str, revision: str | None, file: str, blobs: Path) -> None:
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers

    url = hf_hub_url(repository, file, revision=revision)
    headers = build_hf_headers()
    about = get_hf_file_metadata(url, headers=headers)
    takes_xet = find_spec("hf_xet") is not None and not constants.HF_HUB_DISABLE_XET
    if about.xet_file_data is not None and takes_xet:
        return
    if not about.etag or len(about.etag) != _SHA256 or not about.size:
        return
    whole, part = blobs / about.etag, blobs / (about.etag + ENDING)
    blobs.mkdir(parents=True, exist_ok=True)
    with part.open("a+b") as opened:
        with contextlib.suppress(OSError):  # of file systems without locks
            fcntl.flock(opened, fcntl.LOCK_EX)  # another process may be at it
        if whole.exists():
            part.unlink(missing_ok=True)
            return
        begun = opened.seek(0, os.SEEK_END)
        if begun < about.size:
            http_get(url, opened, resume_size=begun, headers=headers, expected_size=about.size)
        opened.flush()
        if begun and not _is(part, about.etag):
            part.unlink()
            raise ModelError(f"{file} came in parts that do not belong together: try again")
        part.replace(whole)


def _is(file: Path, digest: str) -> bool:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest() == digest
