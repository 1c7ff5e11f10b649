"""The files of the web page, and the headers that restrict it."""

from __future__ import annotations

import gzip
import hashlib
import json
from functools import cache
from pathlib import Path
from typing import NamedTuple

from ...shared.config.sampling_fields import NUMBERS

FOLDER = Path(__file__).parent / "page"
INDEX = "index.html"
# Generated from the table of sampling parameters.
SAMPLING = "chat/sampling_numbers.js"
KINDS = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# With trusted types the browser refuses to parse any string as HTML or script, so a model's output
# can only become text.
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
    # Revalidated each time, so that a page never runs scripts of another version.
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
    """All files by their path below the folder, loaded on the first request."""
    files = {
        path.relative_to(FOLDER).as_posix(): _page_file(path.suffix, path.read_bytes())
        for path in sorted(FOLDER.rglob("*"))
        if path.suffix in KINDS
    }
    return files | {SAMPLING: _page_file(".js", _sampling_numbers())}


def _sampling_numbers() -> bytes:
    """The script with the settings of numeric sampling parameters."""
    rows = [
        {
            "kind": "number",
            "name": name,
            "label": name.replace("_", " ").capitalize(),
            "min": number.computable[0] if number.above else number.minimum,
            "max": number.maximum,
            "step": 1 if number.kind is int else "any",
            "help": number.help,
            "otherwise": "",
        }
        for name, number in NUMBERS.items()
    ]
    return b"export const NUMBERS = %b;\n" % json.dumps(rows, indent=2).encode()


def _page_file(suffix: str, content: bytes) -> PageFile:
    tag = hashlib.sha256(content).hexdigest()[:24]
    compressed = gzip.compress(content, mtime=0)
    return PageFile(KINDS[suffix], content, compressed, f'"{tag}"')
