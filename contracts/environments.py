"""Virtual environments of the suites, with the upstream tests that they run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
import tempfile
import venv
from importlib.metadata import version
from pathlib import Path
from typing import Any

from .suites import OTHERS, VENVS, Sources, Suite


def environment(name: str, suite: Suite) -> Path:
    """The suite's folder, created on the first run and whenever its requirements change."""
    folder = VENVS / name
    complete, stamp = folder / "complete", repr((suite.packages, suite.npm, suite.sources))
    if not complete.exists() or complete.read_text() != stamp:
        venv.create(folder, clear=True, with_pip=True)
        pinned = _see_own_packages(folder) if suite.torch else ()
        if suite.packages:
            _pip(folder, "install", "--quiet", *suite.packages, *pinned).check_returncode()
        if suite.npm:
            subprocess.run(["npm", "install", "--prefix", folder, *suite.npm], check=True)
        if suite.sources is not None:
            _fetch(suite.sources, folder)
        complete.write_text(stamp)
    return folder


def _pip(folder: Path, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([folder / "bin" / "pip", *arguments], text=True, **options)


def _see_own_packages(folder: Path) -> tuple[str, ...]:
    """Make the packages of Tandem's environment importable: torch is too large to install twice.
    Returns a requirement that keeps pip from replacing it."""
    (site,) = folder.glob("lib/python*/site-packages")
    own = sysconfig.get_path("purelib")
    (site / "own.pth").write_text(f"import site; site.addsitedir({own!r})\n")
    return (f"torch=={version('torch')}",)


def _fetch(sources: Sources, folder: Path) -> None:
    """Copy the tests of a release from its archive, which pip unpacks into its temporary folder.
    The release itself need not be buildable here. Every folder becomes a package, so relative
    imports between tests work."""
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        options = ("--no-deps", "--no-binary=:all:", "--no-build-isolation", "--no-clean")
        install = _pip(
            *(folder, "download", *options, f"--dest={scratch}", sources.requirement),
            env=os.environ | {"TMPDIR": scratch},
            capture_output=True,
        )
        unpacked = list(Path(scratch).glob(f"*/*/{sources.folder}"))
        if not unpacked:
            lacking = f"{sources.requirement} has no folder {sources.folder}"
            raise SystemExit(f"{lacking}; pip says:\n{install.stderr}")
        copied = folder / OTHERS / unpacked[0].name
        shutil.copytree(unpacked[0], copied)
    for folder_path in (copied.parent, *(path for path in copied.rglob("*") if path.is_dir())):
        (folder_path / "__init__.py").touch()
