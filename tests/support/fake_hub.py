"""A Hugging Face hub in this process, which counts the bytes of weights that it gives away."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from hashlib import sha1, sha256
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socket import SHUT_RDWR
from urllib.parse import quote, unquote

import pytest

from tandem.tests.support.http_serving import serving_with

WEIGHTS = (".safetensors", ".bin", ".gguf", ".pth")
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeHub:
    """Repositories by name; ``refusals`` have a status and the ``X-Error-Code`` instead, for names,
    and for ``NAME/FILE``. ``tokens`` are those that gated repositories want with every request.
    ``revisions`` are those of all repositories. Files of weights are given by a redirection, as LFS
    files are, and in ranges; the redirected request needs no token."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.refusals: dict[str, tuple[int, str]] = {}
        self.tokens: dict[str, str] = {}
        self.given: list[str] = []
        self.ranges: list[tuple[str, int]] = []  # those of parts of files, and their bytes
        self.resumed: list[int] = []  # where downloads went on
        self.revisions = {"main": COMMIT}
        # Bytes of a file of weights, after which the connection ends, and the file is refused.
        self.breaks_after: int | None = None

    def put(self, name: str, files: Mapping[str, bytes | str | dict[str, object]]) -> None:
        """Add a repository; objects are JSON."""

        def content(value: bytes | str | dict[str, object]) -> bytes:
            text = json.dumps(value) if isinstance(value, dict) else value
            return text.encode() if isinstance(text, str) else text

        self.repositories[name] = {file: content(value) for file, value in files.items()}

    def put_folder(self, name: str, folder: Path) -> None:
        """Add a repository with the files of a folder."""
        self.put(name, {path.name: path.read_bytes() for path in folder.iterdir()})

    @property
    def weight_requests(self) -> list[str]:
        """The files of weights that were downloaded."""
        return [file for file in self.given if file.endswith(WEIGHTS)]


def serving() -> AbstractContextManager[FakeHub]:
    """Serve a hub at a port of this machine."""
    return serving_with(_Handler, FakeHub)


@contextmanager
def used_here(monkeypatch: pytest.MonkeyPatch, cache: Path) -> Iterator[FakeHub]:
    """Serve a hub that the client library of this process uses, with an empty cache."""
    from huggingface_hub import constants

    with serving() as hub:
        use(monkeypatch, hub.url)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        yield hub


def use(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """Have the client library of this process take its files from ``url``."""
    from huggingface_hub import constants, file_download

    monkeypatch.setattr(constants, "ENDPOINT", url)
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    for module in (constants, file_download):
        monkeypatch.setattr(module, "HUGGINGFACE_CO_URL_TEMPLATE", template, raising=False)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._respond(with_body=False)

    def do_GET(self) -> None:
        self._respond(with_body=True)

    def _respond(self, *, with_body: bool) -> None:
        hub: FakeHub = self.server.hub  # type: ignore[attr-defined]
        parts = unquote(self.path.split("?")[0]).strip("/").split("/")
        stored = parts[:1] == ["lfs"]
        parts = parts[1:] if stored else parts
        parts = parts[2:] if parts[:2] == ["api", "models"] else parts
        name, rest = "/".join(parts[:2]), parts[2:]
        file = "/".join(rest[2:])
        revisions = {*hub.revisions, *hub.revisions.values()}
        if f"{name}/{file}" in hub.refusals:
            self._refuse(*hub.refusals[f"{name}/{file}"])
        elif name in hub.refusals or name not in hub.repositories:
            self._refuse(*hub.refusals.get(name, (404, "RepoNotFound")))
        elif not stored and (status := self._forbidden(hub.tokens.get(name))):
            self._refuse(status, "GatedRepo")
        elif rest == ["refs"]:
            branches = [{"name": each, "ref": f"refs/heads/{each}"} for each in hub.revisions]
            branches = [each | {"targetCommit": COMMIT} for each in branches]
            self._send(json.dumps({"branches": branches, "tags": [], "converts": []}).encode())
        elif len(rest) > 1 and rest[1] not in revisions:
            self._refuse(404, "RevisionNotFound")
        elif rest[:1] == ["resolve"]:
            self._give(hub, name, rest[1], file, with_body=with_body, stored=stored)
        elif rest[:1] == ["tree"]:
            files = hub.repositories[name]
            self._send(json.dumps([_entry(file, files[file]) for file in sorted(files)]).encode())
        else:
            self._describe(hub, name, rest[1] if len(rest) > 1 else "main")

    def _forbidden(self, token: str | None) -> int:
        """The status for a request without this token; zero for one that has it."""
        given = self.headers.get("Authorization")
        if token is None or given == f"Bearer {token}":
            return 0
        return 403 if given else 401

    def _describe(self, hub: FakeHub, name: str, revision: str) -> None:
        files = hub.repositories[name]
        siblings = [{"rfilename": file, "size": len(files[file])} for file in sorted(files)]
        described = {"id": name, "private": False, "tags": [], "downloads": 0}
        sha = hub.revisions.get(revision, revision)
        self._send(json.dumps(described | {"sha": sha, "siblings": siblings}).encode())

    def _give(
        self, hub: FakeHub, name: str, revision: str, file: str, *, with_body: bool, stored: bool
    ) -> None:
        content = hub.repositories[name].get(file)
        if content is None:
            self._refuse(404, "EntryNotFound")
            return
        commit = hub.revisions.get(revision, revision)
        headers = {"X-Repo-Commit": commit, "ETag": f'"{_etag(file, content)}"'}
        if file.endswith(WEIGHTS) and not stored:
            linked = {"X-Linked-Etag": headers["ETag"], "X-Linked-Size": str(len(content))}
            where = f"/lfs/{name}/resolve/{revision}/{quote(file)}"
            self._send(b"", headers | linked | {"Location": where}, status=302)
            return
        status, begin, end = 200, 0, len(content)
        if match := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            begin, end = int(match[1]), min(int(match[2] or len(content)) + 1, len(content))
            headers["Content-Range"] = f"bytes {begin}-{end - 1}/{len(content)}"
            status = 206
        if with_body and status == 206 and match and match[2]:
            hub.ranges.append((file, end - begin))
        elif with_body:
            hub.given.append(file)
            hub.resumed += [begin] if begin else []
        breaks = hub.breaks_after if stored and with_body and not (match and match[2]) else None
        self._send(content[begin:end], headers, status=status, with_body=with_body, limit=breaks)
        if breaks is not None and end - begin > breaks:
            hub.refusals[f"{name}/{file}"] = (500, "")
            self.connection.shutdown(SHUT_RDWR)
            self.close_connection = True

    def _refuse(self, status: int, code: str) -> None:
        self._send(b"{}", {"X-Error-Code": code}, status=status)

    def _send(
        self,
        content: bytes,
        headers: Mapping[str, str] | None = None,
        *,
        status: int = 200,
        with_body: bool = True,
        limit: int | None = None,
    ) -> None:
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if not with_body or self.command == "HEAD":
            return
        self.wfile.write(content[:limit])
        self.wfile.flush()


def _blob(content: bytes) -> str:
    return sha1(content, usedforsecurity=False).hexdigest()


def _etag(file: str, content: bytes) -> str:
    return sha256(content).hexdigest() if file.endswith(WEIGHTS) else _blob(content)


def _entry(file: str, content: bytes) -> dict[str, object]:
    entry = {"type": "file", "path": file, "size": len(content), "oid": _blob(content)}
    if file.endswith(WEIGHTS):
        entry["lfs"] = {"oid": _etag(file, content), "size": len(content), "pointerSize": 130}
    return entry
