"""A private mount namespace that stands in for a container: nothing is built or pulled.

It has the system and this checkout, mounted read-only, `/tmp` and `/cache` of its own, user 10001,
no capability, and the environment of the image.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import site
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from . import deployment as d

SYSTEM = [
    path for path in ("/usr", "/bin", "/lib", "/lib64", "/etc", "/dev") if Path(path).exists()
]
USER = 10001
PLACES = ("/tmp", "/cache")


def image_environment() -> dict[str, str]:
    """``ENV`` of the Dockerfile's runtime stage, with this interpreter in place of the image's."""
    stage = (d.DEPLOY / "Dockerfile").read_text().split(" AS runtime")[1]
    (block,) = re.findall(r"^ENV ((?:.*\\\n)*.*)$", stage.split("\nFROM ")[0], re.M)
    variables = dict(pair.split("=", 1) for pair in block.replace("\\\n", " ").split())
    paths = os.pathsep.join(path for path in sys.path if path)
    return variables | {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "PYTHONPATH": paths}


def python_folders() -> list[str]:
    """The folders that Python reads to run this checkout: its own, and those of `.pth` files."""
    folders = {sys.prefix, sys.base_prefix, str(d.ROOT), *site.getsitepackages()}
    folders |= {path for path in sys.path if Path(path).is_dir()}
    names = {
        normalize(folder)
        for folder in folders
        for normalize in (os.path.realpath, os.path.normpath)
    }
    parents: list[str] = []
    for folder in sorted(names, key=len):
        if not any(folder == have or folder.startswith(have + "/") for have in [*SYSTEM, *parents]):
            parents.append(folder)
    return parents


def script(
    command: list[str], root: Path, files: Mapping[str, Path], addresses: tuple[str, ...]
) -> str:
    """A shell script that becomes ``command`` in such a place; run in a mount namespace."""
    lines = ["set -eu", f"root={shlex.quote(str(root))}", "mount -t tmpfs -o mode=755 tmpfs $root"]
    # First, for the checkout may lie in one of them.
    for place in PLACES:
        lines += [f"mkdir -p $root{place}", f"mount -t tmpfs -o mode=1777,exec tmpfs $root{place}"]
    for folder in [*SYSTEM, *python_folders()]:
        where = shlex.quote(folder)
        lines += [f"mkdir -p $root{where}", f"mount --rbind {where} $root{where}"]
        if folder != "/dev":
            lines.append(f"mount -o remount,bind,ro $root{where}")
    for inside, outside in files.items():
        if outside.is_dir():
            lines.append(f"mkdir -p $root{inside}")
        lines.append(f"mount --bind {shlex.quote(str(outside))} $root{inside}")
    # A new one: processes are numbered anew.
    lines += ["mkdir $root/proc", "mount -t proc proc $root/proc", "mount -o remount,ro $root"]
    if addresses:
        lines.append("ip link set lo up")
        lines += [f"ip address add {address}/32 dev lo" for address in addresses]
    # Another user's process forgets whose death it was to die with: --pdeathsig says it again.
    drop = f"setpriv --reuid={USER} --regid={USER} --clear-groups --no-new-privs"
    drop += " --bounding-set=-all --pdeathsig=KILL"
    variables = [f"{name}={value}" for name, value in image_environment().items()]
    lines.append(f"exec chroot $root {drop} env -i -C /tmp {shlex.join([*variables, *command])}")
    return "\n".join(lines)


def contained(
    command: list[str],
    root: Path,
    *,
    files: Mapping[str, Path] | None = None,
    addresses: tuple[str, ...] = (),
) -> list[str]:
    """``root`` is an empty folder; ``files`` are put at paths in it. With ``addresses`` the place
    has a network of its own. Whoever kills ``unshare`` ends all that runs in it; it ignores other
    signals."""
    unshare = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--propagation=private"]
    if addresses:
        unshare.append("--net")
    return [*unshare, "sh", "-c", script(command, root, files or {}, addresses)]


def impossible(root: Path, *, addresses: tuple[str, ...] = ()) -> str:
    """Empty, or why no such place can be made here."""
    if os.geteuid() != 0:
        return "only root may mount"
    programs = ["unshare", "setpriv", "chroot", "mount", *(["ip"] if addresses else [])]
    missing = [name for name in programs if not shutil.which(name)]
    if missing:
        return f"{', '.join(missing)} is not installed"
    command = contained(["true"], root, addresses=addresses)
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return (done.stderr.strip() or "refused").splitlines()[-1] if done.returncode else ""
