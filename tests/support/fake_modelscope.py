"""ModelScope's API in this process: the files of repositories, and their contents in ranges."""

from __future__ import annotations

import json
import re
from contextlib import AbstractContextManager
from hashlib import sha256
from http.server import BaseHTTPRequestHandler
from urllib.parse import parse_qs, urlsplit

from tandem.tests.support.http_serving import serving_with


class FakeModelScope:
    """Repositories by name; ``refusals`` have a status instead."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.refusals: dict[str, int] = {}
        self.revisions = ["master", "v1.0"]
        self.given: list[str] = []
        self.ranges: list[str] = []
        self.tokens: set[str] = set()  # those that were shown


def serving() -> AbstractContextManager[FakeModelScope]:
    """Serve the API at a port of this machine."""
    return serving_with(_Handler, FakeModelScope)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub: FakeModelScope = self.server.hub  # type: ignore[attr-defined]
        address = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(address.query).items()}
        match = re.fullmatch(r"/(?:api|openapi)/v1/models/([^/]+/[^/]+)(/.*)?", address.path)
        if token := re.search(r"m_session_id=(\w+)", self.headers.get("Cookie", "")):
            hub.tokens.add(token[1])
        name = match[1] if match else ""
        if name in hub.refusals or name not in hub.repositories:
            self._tell(None, status=hub.refusals.get(name, 404))
        elif query.get("Revision", "master") not in hub.revisions:
            self._tell(None, status=404)
        elif match and match[2] == "/repo/files":
            self._tell({"Files": self._listed(hub.repositories[name])})
        elif match and match[2] == "/revisions":
            tags = [{"Revision": each} for each in hub.revisions]
            self._tell({"RevisionMap": {"Tags": tags, "Branches": []}})
        elif match and match[2] == "/repo":
            self._give(hub, hub.repositories[name], query["FilePath"])
        else:
            self._tell({"Path": name.split("/")[0], "Name": name.split("/")[1], "Id": 1})

    def _listed(self, files: dict[str, bytes]) -> list[dict[str, object]]:
        return [
            {
                "Path": file,
                "Name": file,
                "Type": "blob",
                "Size": len(content),
                "Sha256": sha256(content).hexdigest(),
            }
            for file, content in files.items()
        ]

    def _give(self, hub: FakeModelScope, files: dict[str, bytes], file: str) -> None:
        content = files.get(file)
        if content is None:
            self._tell(None, status=404)
            return
        begin, end, status = 0, len(content), 200
        if match := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            begin, end = int(match[1]), min(int(match[2] or len(content)) + 1, len(content))
            status = 206
        if self.command == "GET":
            (hub.ranges if end - begin < len(content) else hub.given).append(file)
        self.send_response(status)
        if status == 206:
            self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{len(content)}")
        self._end(content[begin:end])

    def _tell(self, data: object, *, status: int = 200) -> None:
        body = {"Code": status, "Data": data, "Success": status == 200, "Message": ""}
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self._end(json.dumps(body).encode())

    def _end(self, content: bytes) -> None:
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)
