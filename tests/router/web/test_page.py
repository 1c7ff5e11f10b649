"""The files of the page: complete, small, restricted, and safe from injection."""

from __future__ import annotations

import re
from pathlib import Path

from tandem.router.web.page_files import FOLDER, HEADERS, INDEX, page_files
from tandem.tests.router.support import cluster

SCRIPTS = {name: file for name, file in page_files().items() if name.endswith(".js")}
# XML namespaces, which are not fetched, and allowed beginnings of links.
NAMES = ("http://www.w3.org/2000/svg", "http://www.w3.org/1998/Math/MathML")
SINKS = (
    "innerHTML",
    "outerHTML",
    "insertAdjacent",
    "document.write",
    "eval(",
    "Function(",
    "srcdoc",
    "DOMParser",
    "createContextualFragment",
    '"javascript:',
)
IMPORT = re.compile(r'(?:from|import\(?)\s*"(\./[^"]+|\.\./[^"]+)"')


def text(name: str) -> str:
    return page_files()[name].content.decode()


def imports(name: str) -> set[str]:
    here = (FOLDER / name).parent
    targets = {(here / target).resolve() for target in IMPORT.findall(text(name))}
    return {path.relative_to(FOLDER.resolve()).as_posix() for path in targets}


def linked() -> set[str]:
    """The files that the HTML document refers to."""
    return set(re.findall(r'(?:src|href)="web/([^"]+)"', text(INDEX)))


def test_every_file_is_used_and_every_used_file_is_there() -> None:
    reached: set[str] = {INDEX}
    new = linked()
    while new:
        reached |= new
        new = set().union(*(imports(name) for name in new if name.endswith(".js"))) - reached
    assert reached == set(page_files())


def test_a_first_load_is_small() -> None:
    """All files, although some are loaded on demand."""
    files = page_files().values()
    assert sum(len(file.compressed) for file in files) < 75_000
    assert sum(len(file.content) for file in files) < 250_000


def test_scripts_have_no_way_to_parse_text_as_html_or_code() -> None:
    assert len(SCRIPTS) > 10
    sinks = [(name, sink) for name in SCRIPTS for sink in SINKS if sink in text(name)]
    assert sinks == []


def test_nothing_names_another_server() -> None:
    for name in page_files():
        rest = text(name)
        for allowed in NAMES:
            rest = rest.replace(allowed, "")
        assert not re.search(r"https?://\w", rest), name
        assert "@import" not in rest and "url(" not in rest, name


def test_the_document_has_no_script_and_no_style_of_its_own() -> None:
    assert re.findall(r"<script(?![^>]* src=)", text(INDEX)) == []
    assert not re.search(r"<style|\son\w+=|\sstyle=", text(INDEX))
    policy = HEADERS["content-security-policy"]
    assert "unsafe" not in policy and "default-src 'none'" in policy
    assert "require-trusted-types-for 'script'" in policy and "frame-ancestors 'none'" in policy


async def test_files_are_served_with_their_headers(tmp_path: Path) -> None:
    async with cluster(tmp_path, nodes=0) as c:
        for path in ("/", "/cluster", *(f"/web/{name}" for name in page_files())):
            response = await c.client.get(path)
            assert response.status_code == 200, path
            assert HEADERS.items() <= dict(response.headers).items(), path
            assert response.headers["content-encoding"] == "gzip"
            headers = {"if-none-match": response.headers["etag"]}
            same = await c.client.get(path, headers=headers)
            assert (same.status_code, same.content) == (304, b"")
        plain = await c.client.get("/", headers={"accept-encoding": "identity"})
        assert plain.content == page_files()[INDEX].content
        assert (await c.client.head("/")).status_code == 200
        for path in ("/web/", "/web/none.js", "/web/..%2fpage_files.py", "/web//etc/passwd"):
            missing = await c.client.get(path)
            assert missing.status_code == 404, path
            assert missing.json()["error"]["code"] == "unknown_url"


async def test_the_page_needs_no_key_and_its_data_does(tmp_path: Path) -> None:
    async with cluster(tmp_path, api_key="secret") as c:
        assert (await c.client.get("/")).status_code == 200
        data = await c.client.get("/v1/models")
        assert data.status_code == 401
        # With a Basic challenge, the browser would show its own dialog instead of the page's field.
        assert data.headers["www-authenticate"].startswith("Bearer")
        headers = {"authorization": "Bearer secret"}
        assert (await c.client.get("/cluster/state", headers=headers)).status_code == 200
        for path in ("/cluster", "/web/main.js"):
            assert (await c.client.get(path)).status_code == 200
        key_usage = c.router.app.services.usage.all()
        assert not any(counts.requests for counts in key_usage.values()), "none of these is counted"
