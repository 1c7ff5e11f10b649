"""Versions and GGUF files of the hub: what is fetched, and what is told if it cannot be."""

from __future__ import annotations

import errno
import gc
import json
import os
import pty
import re
import shutil
import struct
import sys
import termios
import warnings
from collections.abc import Iterator
from pathlib import Path
from tempfile import gettempdir
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import constants, file_download

from tandem.__main__ import cli
from tandem.shared.config import EngineConfig
from tandem.shared.errors import ModelError
from tandem.shared.weights import header_files, locate, remote_headers, resumable, transfer
from tandem.shared.weights.gguf.tensor_types import TENSOR_TYPES
from tandem.shared.weights.locate import find_model
from tandem.shared.weights.obtain import ObtainedModel, obtain_model
from tandem.shared.weights.source import open_source
from tandem.tests.support import fake_hub
from tandem.tests.support.checkpoints import tiny_models
from tandem.tests.support.checkpoints.gguf_files import write_gguf
from tandem.tests.support.fake_hub import COMMIT, FakeHub, used_here

NAME = "owner/model"
OLDER = "f" * 40


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def gguf(root: Path) -> bytes:
    file = write_gguf(tiny_models.cached("qwen3", root), root / "model.gguf", "Q8_0")
    return file.read_bytes()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    with used_here(monkeypatch, tmp_path / "cache") as serving:
        serving.revisions["v1"] = OLDER
        yield serving


def obtain(name: str = NAME, **options: Any) -> ObtainedModel:
    return obtain_model(EngineConfig(model=name, **options))


def refusal(name: str = NAME, **options: Any) -> str:
    with pytest.raises(ModelError) as caught:
        obtain(name, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# -- revisions ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("revision", "commit"), [("v1", OLDER), (OLDER, OLDER), ("main", COMMIT), (COMMIT, COMMIT)]
)
def test_a_revision_is_a_branch_a_tag_or_a_commit(
    hub: FakeHub, root: Path, monkeypatch: pytest.MonkeyPatch, revision: str, commit: str
) -> None:
    hub.put_folder(NAME, tiny_models.cached("qwen3", root))
    name = f"{NAME}@{revision}"
    assert obtain(name).path.name == commit
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert obtain(name).path.name == commit
    assert "HF_HUB_OFFLINE is set" in refusal(f"{NAME}@other")


def test_the_parts_of_a_server_load_the_version_that_was_judged(
    hub: FakeHub, root: Path, gguf: bytes
) -> None:
    """Also those that are started again after the branch has moved on."""
    hub.put_folder(NAME, tiny_models.cached("qwen3", root))
    hub.put("owner/gguf", {"m-Q8_0.gguf": gguf})
    for name in (NAME, "owner/gguf:Q8_0"):
        first = obtain(name)
        assert first.name == f"{name}@{COMMIT}"
        hub.revisions["main"] = OLDER
        assert obtain(first.name).path == first.path
        hub.revisions["main"] = COMMIT
    assert obtain("builtin").name == "builtin"


def test_a_revision_that_is_not_there(hub: FakeHub, root: Path) -> None:
    hub.put_folder(NAME, tiny_models.cached("qwen3", root))
    hub.revisions["v1.5-chat"] = OLDER
    assert "owner/model has no revision 'v1.5'; it has v1, v1.5-chat" in refusal(f"{NAME}@v1.5")
    assert "has no revision 'zzz'; it has main, v1" in refusal(f"{NAME}@zzz")
    assert hub.given == []


# -- GGUF files --------------------------------------------------------------------------------


def test_of_a_gguf_file_the_header_comes_first_and_then_only_that_file(
    hub: FakeHub, gguf: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(header_files, "_FIRST_GGUF", 1 << 10)  # smaller than the header
    files = {"m-Q8_0.gguf": gguf, "m-F16.gguf": b"other", "mmproj-Q8_0.gguf": b"other"}
    hub.put(NAME, {**files, "config.json": "{}", "README.md": "x"})
    with find_model(NAME) as location:
        header = open_source(location.path)
        assert header.tensor_names() and header.tokenizer_files().tokenizer
        assert location.path.stat().st_size == len(gguf)
    assert not location.path.exists()
    assert hub.given == [] and {file for file, _ in hub.ranges} == {"m-Q8_0.gguf"}
    assert sum(size for _, size in hub.ranges) < len(gguf)
    model = obtain()
    assert model.path.read_bytes() == gguf and model.generates
    assert hub.given == ["m-Q8_0.gguf"]
    ranges = len(hub.ranges)
    for name in (NAME, f"{NAME}:Q8_0", f"{NAME}:m-Q8_0.gguf", f"{NAME}/m-Q8_0.gguf"):
        assert obtain(name).path == model.path
    assert hub.given == ["m-Q8_0.gguf"] and len(hub.ranges) == ranges
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for name in (NAME, f"{NAME}:Q8_0"):
        assert obtain(name).path == model.path
    assert "HF_HUB_OFFLINE is set, and the cache" in refusal(f"{NAME}:F16")


def test_safetensors_are_preferred_to_gguf_files(hub: FakeHub, root: Path, gguf: bytes) -> None:
    files = {path.name: path.read_bytes() for path in tiny_models.cached("qwen3", root).iterdir()}
    hub.put(NAME, {**files, "m-Q8_0.gguf": gguf})
    assert obtain().path.is_dir()
    assert hub.weight_requests == ["model.safetensors"]
    assert obtain(f"{NAME}:Q8_0").path.name == "m-Q8_0.gguf"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"GGUF" + bytes(5000), "GGUF"),
        (b"<html>", "is not a GGUF file: it begins with b'<htm'"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
    ],
)
def test_nothing_is_downloaded_of_a_gguf_file_with_an_invalid_header(
    hub: FakeHub, content: bytes, words: str
) -> None:
    hub.put(NAME, {"m-Q8_0.gguf": content})
    assert words in refusal()
    assert hub.given == []


def test_a_gguf_file_of_an_unsupported_model_is_refused_by_its_header(
    hub: FakeHub, root: Path, tmp_path: Path
) -> None:
    folder = tiny_models.cached("qwen3", root)
    file = write_gguf(folder, tmp_path / "m.gguf", change=lambda writer: writer.add_type("mmproj"))
    hub.put(NAME, {"m-F32.gguf": file.read_bytes()})
    assert "it is the vision or audio part (mmproj) of a model" in refusal()
    assert hub.given == []


def test_a_gguf_file_that_lacks_a_tensor_is_refused_by_its_header(
    hub: FakeHub, root: Path, tmp_path: Path
) -> None:
    """The error names the file in its repository, for there is none here."""

    def change(writer: Any) -> None:
        writer.tensors[0].pop("blk.1.attn_q.weight")

    file = write_gguf(tiny_models.cached("qwen3", root), tmp_path / "m.gguf", change=change)
    hub.put(NAME, {"sub/m-F32.gguf": file.read_bytes(), "sub/m-F16.gguf": b"GGUF" + bytes(99)})
    assert refusal(f"{NAME}:F32").startswith(
        f"{NAME}/sub/m-F32.gguf lacks blk.1.attn_q.weight: configuration and weights do not"
    )
    assert refusal(f"{NAME}:F16").startswith(f"{NAME}/sub/m-F16.gguf is a GGUF file")
    with pytest.raises(ModelError, match="lacks blk"):
        obtain_model(EngineConfig(model=str(file)))
    assert hub.given == []


# -- what to use instead -----------------------------------------------------------------------


def of_type(content: bytes, tensor: str, number: int) -> bytes:
    """A GGUF file whose header says that a tensor is of another type."""
    name = struct.pack("<Q", len(tensor)) + tensor.encode()
    at = content.index(name) + len(name)
    (dimensions,) = struct.unpack_from("<I", content, at)
    at += 4 + 8 * dimensions
    return content[:at] + struct.pack("<I", number) + content[at + 4 :]


def test_a_file_of_the_same_repository_is_named_that_would_work(hub: FakeHub, gguf: bytes) -> None:
    old = of_type(gguf, "output.weight", 31)
    problem = f"{NAME}/m-Q4_0.gguf: output.weight is of type Q4_0_4_4, which is not supported; use "
    files = {"m-Q4_0.gguf": old, "m-Q4_0_4_4.gguf": old}
    hub.put(NAME, files)
    assert refusal() == problem + "a file of the same model in one of these types: " + ", ".join(
        kind.name for kind in TENSOR_TYPES.values()
    )
    hub.put(NAME, files | {"m-Q8_0.gguf": gguf, "other-Q6_K.gguf": gguf, "m-Q2_K.gguf": gguf})
    assert refusal() == f"{problem}{NAME}:Q8_0"
    assert refusal(f"{NAME}:Q4_0@v1") == f"{problem}{NAME}:Q8_0@v1"
    hub.put(NAME, files | {"m-Q8_0.gguf": gguf, "sub/m-Q8_0.gguf": gguf})
    assert refusal() == f"{problem}{NAME} --f m-Q8_0.gguf"
    assert hub.given == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"quantization_config": {"quant_method": "quip"}}, "method quip), which is not supported"),
        ({"quantization": {"bits": 7, "group_size": 64}}, "bits is 7; supported: 2 or 3 or 4 or 5"),
    ],
)
def test_a_gguf_file_beside_safetensors_is_named(
    hub: FakeHub, root: Path, gguf: bytes, changes: dict[str, Any], words: str
) -> None:
    files = {path.name: path.read_bytes() for path in tiny_models.cached("qwen3", root).iterdir()}
    config = json.loads(files["config.json"]) | changes
    files["gguf/m-Q8_0.gguf"] = gguf
    hub.put(NAME, files | {"config.json": config})
    assert words in (message := refusal()) and message.endswith(f"; use {NAME}:Q8_0")
    hub.put("owner/opt", files | {"config.json": config | {"architectures": ["OPTForCausalLM"]}})
    message = refusal("owner/opt")
    assert words in message and "Q8_0" not in message, "no GGUF files of the family are read"
    assert not hub.weight_requests


def test_files_of_the_same_folder_are_named(gguf: bytes, root: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_models.cached("qwen3", root), tmp_path / "model"))
    bad = folder / "m-Q4_0.gguf"
    bad.write_bytes(of_type(gguf, "output.weight", 31))
    (folder / "other-Q8_0.gguf").write_bytes(gguf)
    assert "; use a file of the same model in one of these types: F32, " in refusal(str(bad))
    (folder / "m-Q6_K.gguf").write_bytes(gguf)
    assert refusal(str(bad)).endswith(f"; use {folder}/m-Q6_K.gguf")
    config = json.loads((folder / "config.json").read_text())
    quip = {"quantization_config": {"quant_method": "quip"}}
    (folder / "config.json").write_text(json.dumps(config | quip))
    assert refusal(str(folder)).endswith(f"; use {folder}/m-Q4_0.gguf")


def test_a_missing_file_is_reported_with_the_existing_ones(hub: FakeHub, gguf: bytes) -> None:
    hub.put(NAME, {"m-Q8_0.gguf": gguf, "m-F16.gguf": b"x"})
    assert "'owner/model' has no GGUF file in Q5_K_M; it has F16, Q8_0" in refusal(f"{NAME}:Q5_K_M")
    assert "has no file 'm.gguf'; it has m-F16.gguf, m-Q8_0.gguf" in refusal(f"{NAME}:m.gguf")
    assert hub.given == [] and hub.ranges == []


# -- what goes wrong ---------------------------------------------------------------------------


def test_weights_that_do_not_fit_are_not_begun(
    hub: FakeHub, root: Path, gguf: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.put_folder(NAME, tiny_models.cached("qwen3", root))
    hub.put("owner/gguf", {"m-Q8_0.gguf": gguf})
    usage = shutil.disk_usage("/")._replace(free=1000)
    monkeypatch.setattr(transfer, "shutil", SimpleNamespace(disk_usage=lambda _: usage))
    for name in (NAME, "owner/gguf"):
        message = refusal(name)
        assert (
            f"'{name}' needs " in message
            and "1.0 KB are free in " in message
            and "HF_HOME" in message
        )
    assert not hub.weight_requests


@pytest.fixture
def large(hub: FakeHub, gguf: bytes, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """A file on the hub that counts as a large one."""
    monkeypatch.setattr(resumable, "LARGE", 1 << 20)
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1 << 16)
    content = gguf + bytes(4 << 20)
    hub.put(NAME, {"m-Q8_0.gguf": content})
    return content


class FullDisk:
    """A file on a disk that has room for so many more bytes."""

    def __init__(self, file: Any, room: int) -> None:
        self._file, self._room = file, room

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, data: bytes) -> int:
        self._file.write(data[: self._room])
        self._room -= len(data)
        if self._room < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return len(data)


@pytest.mark.parametrize("kind", ["large", "small", "tokenizer", "header", "headers"])
def test_a_full_disk_is_a_one_line_error_and_keeps_the_partial_file(
    hub: FakeHub, root: Path, gguf: bytes, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    hub.put_folder(NAME, tiny_models.cached("qwen3", root))
    if kind == "large":
        monkeypatch.setattr(resumable, "LARGE", 1 << 10)
        monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1 << 12)
    room = 0 if kind == "tokenizer" else 20_000
    get: Any = file_download.http_get

    def fails(url: str, file: Any, **options: Any) -> None:
        get(url, FullDisk(file, room), **options)

    def fails_at_once(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as full, warnings.catch_warnings(record=True) as warned:
        full.setattr(file_download, "http_get", fails)
        full.setattr(locate, "write_gguf_header", fails_at_once)
        if kind == "headers":
            full.setattr(file_download, "http_get", get)
            full.setattr(remote_headers, "write_safetensors_header", fails_at_once)
            assert f"the disk of {gettempdir()} is full" in refusal() and not hub.weight_requests
        elif kind == "header":
            hub.put(NAME, {"m-Q8_0.gguf": gguf})
            assert f"the disk of {gettempdir()} is full" in refusal() and not hub.given
        else:
            message = refusal()
            assert f"the disk of the cache {constants.HF_HUB_CACHE} is full: free some" in message
            assert "HF_HOME" in message
    assert not warned
    assert not list(Path(constants.HF_HUB_CACHE).rglob("snapshots/*/model.safetensors"))
    assert obtain().generates
    assert hub.resumed == ([20_000] if kind == "large" else [])


def test_a_download_that_breaks_off_goes_on_from_there(
    hub: FakeHub, large: bytes, tmp_path: Path
) -> None:
    hub.breaks_after = len(large) // 2
    assert "responds with status 500" in refusal()
    assert not list((tmp_path / "cache").rglob("m-Q8_0.gguf")), "none is taken for whole"
    hub.breaks_after = None
    hub.refusals.clear()
    model = obtain()
    assert model.path.read_bytes() == large
    assert hub.resumed and min(hub.resumed) > len(large) // 3
    assert not list((tmp_path / "cache").rglob("*.incomplete"))
    count = len(hub.given)
    assert obtain().path == model.path and len(hub.given) == count


def test_parts_that_do_not_belong_together_are_rejected(
    hub: FakeHub, large: bytes, tmp_path: Path
) -> None:
    hub.breaks_after = len(large) // 2
    refusal()
    hub.breaks_after = None
    hub.refusals.clear()
    (part,) = (tmp_path / "cache").rglob("*.incomplete")
    with part.open("r+b") as file:
        file.write(b"other")
    assert "was resumed from a different version: try again" in refusal()
    assert obtain().path.read_bytes() == large


@pytest.mark.parametrize("source", ["HF_TOKEN", "--hf-token"])
def test_a_gated_model_is_downloaded_with_a_token(
    hub: FakeHub, large: bytes, root: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    """Every request has it: also those of headers, and of downloads that go on."""
    hub.put_folder("owner/folder", tiny_models.cached("qwen3", root))
    hub.tokens = dict.fromkeys(hub.repositories, "hf_ours")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", "/nowhere")
    for token in ("", "hf_others"):
        monkeypatch.setenv("HF_TOKEN", token)
        for name in hub.repositories:
            assert "it is gated: accept its terms at" in refusal(name)
    assert hub.given == [] and hub.ranges == []
    options = [] if source == "HF_TOKEN" else ["--hf-token", "hf_ours"]
    if not options:
        monkeypatch.setenv("HF_TOKEN", "hf_ours")
    cli.main(["pull", "owner/folder", *options], standalone_mode=False)
    hub.breaks_after = len(large) // 2
    with pytest.raises(ModelError, match="responds with status 500"):
        cli.main(["pull", NAME, *options], standalone_mode=False)
    hub.breaks_after = None
    hub.refusals.clear()
    cli.main(["pull", NAME, *options], standalone_mode=False)
    assert {file for file, _ in hub.ranges} == {"model.safetensors", "m-Q8_0.gguf"}
    assert hub.resumed and hub.weight_requests[0] == "model.safetensors"


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [
        (403, "GatedRepo", "it is gated: accept its terms at"),
        (401, "GatedRepo", "/owner/model, then run hf auth login, or set HF_TOKEN"),
        (500, "", "responds with status 500; try again later"),
        (404, "EntryNotFound", "lacks a file of it"),
    ],
)
def test_a_file_that_the_hub_does_not_give(
    hub: FakeHub, gguf: bytes, status: int, code: str, words: str
) -> None:
    hub.put(NAME, {"m-Q8_0.gguf": gguf})
    hub.refusals[f"{NAME}/m-Q8_0.gguf"] = (status, code)
    assert words in refusal()


def test_a_hub_that_cannot_be_reached_and_a_part_that_is_not_here(
    hub: FakeHub, gguf: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = {f"m-Q8_0-0000{part}-of-00002.gguf": gguf for part in (1, 2)}
    hub.put(NAME, parts)
    with find_model(NAME) as model:
        assert model.download is not None and model.download.weights == tuple(parts)
        path = model.download([])
    assert sorted(each.name for each in path.parent.iterdir()) == sorted(parts)
    fake_hub.use(monkeypatch, "http://127.0.0.1:9")
    with find_model(NAME) as model:
        assert model.path == path and model.download is None
    (path.parent / max(parts)).unlink()
    with pytest.raises(ModelError, match=r"no connection to http://127.0.0.1:9"), find_model(NAME):
        pass


def test_a_download_is_reported_in_lines_without_a_terminal(
    hub: FakeHub, gguf: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    hub.put(NAME, {"m-Q8_0.gguf": gguf})
    with caplog.at_level("INFO", "tandem.node"):
        obtain()
    first, last = caplog.messages
    assert first.startswith("downloading m-Q8_0.gguf of owner/model, ") and " KB, to " in first
    assert last.startswith("downloaded owner/model in ")


@pytest.mark.parametrize(("smallest", "last"), [(1 << 10, ""), (1 << 30, "kB")])
def test_the_bars_on_a_terminal_end_with_the_download(
    hub: FakeHub, gguf: bytes, monkeypatch: pytest.MonkeyPatch, smallest: int, last: str
) -> None:
    """The client's own, of what it downloads itself, and which it leaves open: they would be drawn
    again when the process ends."""
    hub.put(NAME, {"m-Q8_0.gguf": gguf})
    monkeypatch.setattr(resumable, "LARGE", smallest)
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 60))  # all of it fits into the terminal's buffer
    with open(theirs, "w") as terminal, monkeypatch.context() as patched:
        patched.setattr(sys, "stderr", terminal)
        obtain()
        print("next", file=terminal, flush=True)
        gc.collect()  # as at the end
    text = os.read(ours, 1 << 16).decode()
    os.close(ours)
    *bars, line, rest = re.split(r"[\r\n]+", text)
    assert "100%" in text and (line, rest) == ("next", "")
    assert bars[-1].strip("\x1b[A ")[-2:] == last
