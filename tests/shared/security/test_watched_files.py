"""Files that change while they are in use."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from tandem.shared.errors import StartupError
from tandem.shared.security.watched_files import CHECK_SECONDS, WatchedFiles


class WatchedWorld:
    def __init__(self, folder: Path) -> None:
        self.now = 0.0
        self.file = folder / "file"
        self.file.write_text("first")
        self.reread = WatchedFiles([str(self.file)], self.read, lambda: self.now)

    def read(self) -> str:
        text = self.file.read_text()
        if text == "half":
            raise StartupError("it is only half")
        return text

    def later(self) -> str:
        self.now += CHECK_SECONDS
        return self.reread.value()


def test_a_file_that_changes_is_read_again(tmp_path: Path) -> None:
    world = WatchedWorld(tmp_path)
    assert world.later() == "first" and world.reread.generation == 0
    world.file.write_text("second")
    assert world.reread.value() == "first", "files are not looked at all the time"
    assert world.later() == "second" and world.reread.generation == 1
    world.file.touch()
    os.utime(world.file, ns=(1, 1))
    assert world.later() == "second" and world.reread.generation == 1


def test_a_file_that_cannot_be_used_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tandem")
    world = WatchedWorld(tmp_path)
    world.file.write_text("half")
    assert [world.later(), world.later()] == ["first"] * 2
    assert caplog.text.count("changed but cannot be used") == 1 and "only half" in caplog.text
    world.file.write_text("whole")
    assert world.later() == "whole"


def test_a_link_that_is_turned_to_another_file_is_followed(tmp_path: Path) -> None:
    """Kubernetes changes a mounted secret in this way."""
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
        os.utime(tmp_path / name / "file", ns=(5, 5))
    link, turned = tmp_path / "data", tmp_path / "turned"
    link.symlink_to("old")
    now = [0.0]
    path = link / "file"
    reread = WatchedFiles([str(path)], path.read_text, lambda: now[0])
    assert reread.value() == "old"
    turned.symlink_to("new")
    turned.rename(link)
    now[0] += CHECK_SECONDS
    assert reread.value() == "new"


def test_files_missing_at_start_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        WatchedFiles([str(tmp_path / "none")], (tmp_path / "none").read_text)
