"""Log folders of clusters that are started in one folder."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from tandem.shared.errors import StartupError
from tandem.shared.launch import log_folders
from tandem.shared.launch.log_folders import LATEST, log_folder_of_start


def test_each_start_has_a_folder_of_its_own_and_the_latest_has_a_name(tmp_path: Path) -> None:
    logs = tmp_path / "new" / "logs"
    with log_folder_of_start(logs) as first, log_folder_of_start(logs) as second:
        assert first != second and first.parent == second.parent == logs
        (first / "router.log").write_text("one\n")
        (second / "router.log").write_text("two\n")
        assert (logs / LATEST).resolve() == second.resolve()
        assert (logs / LATEST / "router.log").read_text() == "two\n"
    assert (first / "router.log").read_text() == "one\n"
    assert sorted(entry.name for entry in logs.iterdir()) == [first.name, second.name, LATEST]


def test_old_folders_go_but_not_those_of_running_clusters_or_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_folders, "MAX_FOLDERS", 2)
    others = tmp_path / "20200101-notes"
    others.mkdir()
    (tmp_path / "router.log").touch()
    folders: list[Path] = []
    with contextlib.ExitStack() as running:
        monkeypatch.setattr(log_folders.time, "strftime", lambda form: "20260101-000000")
        folders.append(running.enter_context(log_folder_of_start(tmp_path)))
        for second in range(1, 5):
            moment = f"20260101-00000{second}"
            monkeypatch.setattr(log_folders.time, "strftime", lambda form, moment=moment: moment)
            with log_folder_of_start(tmp_path) as folder:
                (folder / "router.log").touch()
            folders.append(folder)
        assert [folder.exists() for folder in folders] == [True, False, False, True, True]
    assert others.is_dir() and (tmp_path / "router.log").exists()


def test_a_folder_that_is_called_latest_stays(tmp_path: Path) -> None:
    (tmp_path / LATEST).mkdir()
    (tmp_path / LATEST / "mine").touch()
    with log_folder_of_start(tmp_path) as folder:
        assert folder.is_dir()
    assert (tmp_path / LATEST / "mine").exists()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [folder.name, LATEST]


def test_a_place_that_cannot_be_written_is_named() -> None:
    folders = log_folder_of_start(Path("/proc/no"))
    with pytest.raises(StartupError, match=r"cannot write logs to /proc/no.*--log-dir"), folders:
        pytest.fail("it was made")
