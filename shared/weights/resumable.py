"""Downloads of large files that resume after a restart.

The hub's client resumes a broken connection, but discards an incomplete file when its process
exits. So large files are downloaded into its cache here, by its own transfer function, unless they
are in the hub's newer storage (Xet), which has its own chunks. The client then finds the files by
their hashes, like those of other versions.
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
# Smaller files are quickly downloaded again.
LARGE = 64 << 20
_SHA256 = 64


def fetch(repository: str, revision: str | None, files: Sequence[str], blobs: Path) -> None:
    """Download large files into a cache. Raises the client's errors and ``ModelError``; incomplete
    files stay for the next time."""
    for file in files:  # in this thread, so that Ctrl-C works at once
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
    with part.open("a+b") as output:
        with contextlib.suppress(OSError):  # file systems without locks
            fcntl.flock(output, fcntl.LOCK_EX)  # another process may be downloading it
        if whole.exists():
            part.unlink(missing_ok=True)
            return
        offset = output.seek(0, os.SEEK_END)
        if offset < about.size:
            http_get(url, output, resume_size=offset, headers=headers, expected_size=about.size)
        output.flush()
        if offset and not _is(part, about.etag):
            part.unlink()
            raise ModelError(f"{file} was resumed from a different version: try again")
        part.replace(whole)


def _is(file: Path, digest: str) -> bool:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest() == digest
