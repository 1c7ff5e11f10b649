"""The files of the page for browsers, and the headers that confine what it may do."""

from __future__ import annotations

import gzip
import hashlib
from functools import cache
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent / "page"
INDEX = "index.html"
KINDS = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# Trusted types make the browser refuse to parse any string as HTML or as a script: what a model
# writes can only become text.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    # Asked for each time, so that a page and scripts of two versions never meet.
    "cache-control": "no-cache",
    "vary": "accept-encoding",
}


class PageFile(NamedTuple):
    """One file; ``tag`` is its entity tag."""

    kind: str
    content: bytes
    compressed: bytes
    tag: str


@cache
def page_files() -> dict[str, PageFile]:
    """All files by their path below the folder, read when the first browser asks."""
    return {
        path.relative_to(FOLDER).as_posix(): _page_file(path)
        for path in sorted(FOLDER.rglob("*"))
        if path.suffix in KINDS
    }


def _page_file(path: Path) -> PageFile:
    content = path.read_bytes()
    tag = hashlib.sha256(content).hexdigest()[:24]
    compressed = gzip.compress(content, mtime=0)
    return PageFile(KINDS[path.suffix], content, compressed, f'"{tag}"')
