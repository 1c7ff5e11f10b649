"""The images of ``deploy/Dockerfile``: what is sent, installed and promised."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions
from typing import Any

import pytest
from packaging.requirements import Requirement

from tandem import __version__

from . import deployment as d

DOCKERFILE = (d.DEPLOY / "Dockerfile").read_text()
SETTINGS: dict[str, Any] = tomllib.loads((d.ROOT / "pyproject.toml").read_text())
ROUTER = [Requirement(text).name for text in SETTINGS["dependency-groups"]["router"]]


def test_docker_is_sent_everything_the_wheel_is_made_of() -> None:
    lines = (d.ROOT / ".dockerignore").read_text().splitlines()
    allowed = {line[1:] for line in lines if line.startswith("!")}
    packages = [name.split(".") for name in SETTINGS["tool"]["setuptools"]["packages"]]
    folders = {name[1] for name in packages if len(name) > 1}
    files = {path.name for path in d.ROOT.glob("*.py")} | {SETTINGS["project"]["readme"]}
    assert folders | files | {"pyproject.toml", "constraints.txt", "py.typed"} <= allowed
    assert "*" in lines and not allowed & {"tests", ".git", ".venv", "deploy"}


def test_images_have_all_targets_and_no_root() -> None:
    stages = DOCKERFILE.split("\nFROM ")
    assert {"router", "cpu", "cuda"} <= set(re.findall(r"^FROM \S+ AS (\S+)$", DOCKERFILE, re.M))
    last = [re.findall(r"^USER (\d+)", stage, re.M)[-1:] for stage in stages]
    final_users = {int(user) for users in last for user in users}
    assert len(final_users) == 1 and min(final_users) > 0
    if d.KUBECTL:
        objects = d.build(d.DEPLOY / "kubernetes")
        users = {d.pod(w)["securityContext"]["runAsUser"] for w in d.workloads(objects)}
        assert users == final_users


def test_images_are_named_by_the_version() -> None:
    assert f"ARG VERSION={__version__}" in DOCKERFILE
    tags = re.findall(r"newTag: (\S+)", "\n".join(p.read_text() for p in d.DEPLOY.rglob("*.yaml")))
    tags += re.findall(
        r"image: tandem-\w+:(\S+)", "\n".join(p.read_text() for p in d.COMPOSE_FILES)
    )
    assert tags and all(tag.split("-")[0] == __version__ for tag in tags)
    targets = re.findall(r"--target (\w+) -t tandem-\w+:(\S+)", DOCKERFILE)
    assert {tag for _, tag in targets} == set(tags)


def test_images_install_extras_that_there_are() -> None:
    extra_lists = re.findall(r"^ARG EXTRAS=(\S+)$", DOCKERFILE, re.M)
    extras = SETTINGS["project"]["optional-dependencies"]
    assert len(extra_lists) == 2 and all(
        set(some.split(",")) <= extras.keys() for some in extra_lists
    )


def test_places_that_images_write_to_are_theirs() -> None:
    variables = dict(re.findall(r"(\w+)=(/\S+)", DOCKERFILE.split("\nENV PATH")[-1]))
    places = {name: path for name, path in variables.items() if name != "PATH"}
    assert {"HOME", "XDG_CACHE_HOME", "TRITON_CACHE_DIR"} <= places.keys()
    assert all(path.startswith(("/tmp", "/cache")) for path in places.values())


# --- a router without torch


def closure(names: list[str]) -> set[str]:
    """The distributions that these bring, as this environment has them."""
    visited: set[str] = set()
    pending = [(name, "") for name in names]
    while pending:
        name, extra = pending.pop()
        key = name.lower().replace("_", "-")
        if key in visited:
            continue
        try:
            requirements = distribution(name).requires or []
        except PackageNotFoundError:
            continue  # for another system, or optional
        visited.add(key)
        for text in requirements:
            requirement = Requirement(text)
            if not requirement.marker or requirement.marker.evaluate({"extra": extra}):
                pending.append((requirement.name, ""))
    return visited


def test_the_router_image_holds_no_torch() -> None:
    assert "--group router" in DOCKERFILE
    brought = closure(ROUTER)
    assert not {"torch", "numba", "pyzmq", "nixl", "triton"} & brought


def test_what_a_router_and_its_clients_import_is_in_the_router_image() -> None:
    """Imports inside functions too. Of MCP, the image has the refusal that says what to install."""
    folders = ("router", "client", "commands", "shared/security", "shared/telemetry")
    files = [path for folder in folders for path in (d.ROOT / folder).rglob("*.py")]
    lines = r"^ *(?:from|import) ([a-zA-Z_]\w*)"
    imports = {name for path in files for name in re.findall(lines, path.read_text(), re.M)}
    assert {"httpx", "limits", "cryptography", "grpc"} <= imports
    assert imports & rejected_modules() <= {"mcp", "mcp_types"}


def test_what_the_router_needs_is_a_part_of_what_all_need() -> None:
    """With the same lower bounds."""
    extras = SETTINGS["project"]["optional-dependencies"]
    base = {*SETTINGS["project"]["dependencies"]}.union(
        *(extras[e] for e in ("serve", "otel", "redis"))
    )
    assert {*SETTINGS["dependency-groups"]["router"]} <= base


# Importing what no distribution of the group brings fails, as it would in the image.
RUN = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in REFUSED:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Refuse())
from tandem.__main__ import main
main()
"""


@pytest.mark.parametrize(
    "arguments", [["router", "--help"], ["nodes", "--help"], ["doctor", "--help"]]
)
def test_commands_run_with_what_the_router_image_has(arguments: list[str]) -> None:
    assert "Usage:" in without_torch(arguments, timeout=60)


def test_a_router_starts_with_what_its_image_has() -> None:
    arguments = ["router", "--port=0", "--registry-port=0", "--model=builtin"]
    out = without_torch(arguments, until="listening on")
    assert "listening on" in out


def rejected_modules() -> set[str]:
    """The modules of all that the router's image lacks."""
    brought = closure([*ROUTER, "tandem-llm-itself"])
    return {
        module
        for module, owners in packages_distributions().items()
        if not {owner.lower().replace("_", "-") for owner in owners} & (brought | {"tandem-llm"})
    }


def without_torch(arguments: list[str], *, timeout: float = 60, until: str = "") -> str:
    """The output of such a command, which is ended once it has written ``until``."""
    code = f"REFUSED = {rejected_modules() - {'tandem'}!r}\n{RUN}"
    command = [sys.executable, "-c", code, *arguments]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd="/"
    ) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if until and until in line:
                process.terminate()
        assert process.wait(timeout) == 0, "".join(lines)
    return "".join(lines)
