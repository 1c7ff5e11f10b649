"""Commands of the documents on deployment: flags, names and files that exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml

from . import deployment as d

DOCUMENTS = [
    d.DEPLOY / "README.md",
    d.DEPLOY / "runbook.md",
    d.ROOT / "docs" / "guides" / "kubernetes.md",
]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.M | re.S)
SECRETS = {"tandem-tls", "tandem-token", "tandem-hub", "tandem-api-key"}


def blocks(language: str) -> list[tuple[Path, str]]:
    return [
        (document, body)
        for document in DOCUMENTS
        for kind, body in BLOCK.findall(document.read_text())
        if kind == language
    ]


LINES = [line for _, body in blocks("sh") for line in body.replace("\\\n", " ").splitlines()]


def inline(pattern: str) -> list[str]:
    return [match for path in DOCUMENTS for match in re.findall(pattern, path.read_text())]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_flags_exist(document: Path) -> None:
    options = set().union(
        *(d.options_of(name) for name in ("router", "prefill-node", "decode-node"))
    )
    assert set(re.findall(r"`(--[a-z-]+)", document.read_text())) - {"--build-arg"} <= options


def test_every_flag_of_the_manifests_is_explained() -> None:
    text = (d.DEPLOY / "README.md").read_text()
    flags = {
        argument.partition("=")[0]
        for path in [*d.COMPOSE_FILES, *(d.DEPLOY / "kubernetes").glob("*.yaml")]
        for argument in re.findall(r"- (--[a-z-]+)", path.read_text())
    }
    plain = {"--node-id", "--registry-port", "--d"}
    assert not [flag for flag in flags - plain if f"`{flag}" not in text]


@pytest.mark.parametrize("line", [line for line in LINES if "docker build" in line])
def test_images_are_built_under_the_names_that_manifests_use(line: str) -> None:
    words = shlex.split(line)
    target, tag = words[words.index("--target") + 1], words[words.index("-t") + 1]
    assert f" AS {target}\n" in (d.DEPLOY / "Dockerfile").read_text()
    name, _, version = tag.partition(":")
    manifests = "".join(path.read_text() for path in d.DEPLOY.rglob("*.yaml"))
    assert f"{name}:{version}" in manifests or f"newTag: {version}" in manifests


@pytest.mark.parametrize("line", [line for line in LINES if "docker compose" in line])
def test_compose_names_only_files_and_variables_that_exist(line: str) -> None:
    words = shlex.split(line)
    names = {word.partition("=")[0] for word in words[: words.index("docker")]}
    path = d.ROOT / words[words.index("-f") + 1]
    assert path in d.COMPOSE_FILES
    assert (
        set(re.findall(r"\$\{(\w+):\?", path.read_text())) == names or "exec" in words or not names
    )


@pytest.mark.skipif(not d.KUBECTL, reason=d.NO_KUBECTL)
def test_documents_name_only_kubernetes_objects_that_exist() -> None:
    objects = [
        item
        for name in (*d.OVERLAYS, "download", "monitoring")
        for item in d.build(d.DEPLOY / name)
    ]
    workloads = {f"{item['kind'].lower()}/{item['metadata']['name']}" for item in objects}
    pods = {
        f"{w['metadata']['name']}-{number}"
        for w in d.servers(objects)
        for number in range(w["spec"]["replicas"])
    }
    mentions = inline(r"\b((?:statefulset|service|job)/[a-z0-9-]+)")
    assert mentions and {*mentions} <= workloads
    mentions = inline(r"kubectl (?:exec|logs|describe pod|delete pod) -n tandem ([a-z0-9-]+)")
    assert mentions and {*mentions} <= pods
    assert {*inline(r"create secret generic -n tandem (\S+)")} <= SECRETS
    applied = inline(r"apply -n tandem -k (\S+)")
    assert all((d.ROOT / folder / "kustomization.yaml").exists() for folder in applied)
    assert "kubectl apply -f deploy/namespace.yaml" in LINES


@pytest.mark.skipif(not d.KUBECTL, reason=d.NO_KUBECTL)
def test_commands_that_apply_a_job_delete_an_older_one_first() -> None:
    """A Job cannot be changed, and one that has ended stays for a day."""
    jobs = 0
    for _, body in blocks("sh"):
        lines = body.splitlines()
        for number, line in enumerate(lines):
            if applied := re.search(r"kubectl apply -n tandem -k (\S+)", line):
                for name in d.named(d.build(d.ROOT / applied[1]), "Job"):
                    jobs += 1
                    command = f"kubectl delete -n tandem job/{name} --ignore-not-found"
                    assert command in lines[:number]
    assert jobs


@pytest.mark.skipif(not d.KUBECTL, reason=d.NO_KUBECTL)
def test_secrets_have_the_keys_that_pods_read(tmp_path: Path) -> None:
    objects = d.build(d.DEPLOY / "kubernetes-locked") + d.kustomize(
        tmp_path,
        resources=["kubernetes"],
        components=["components/api-key", "components/model-hub"],
    )
    text = str(objects)
    assert "'tandem-token'" in text and "{'key': 'token', 'path': 'token'}" in text
    for name, keys in (
        ("tandem-token", {"token"}),
        ("tandem-hub", {"token"}),
        ("tandem-api-key", {"keys"}),
    ):
        keys_in_text = set(inline(rf"{name} --from-(?:literal|file)=(\w+)="))
        assert keys_in_text == keys
    assert "'name': 'tandem-hub'" in text and "'secretName': 'tandem-api-key'" in text


def test_commands_of_tandem_parse() -> None:
    spoken = inline(r"exec [^`\n]*?(?:-- |router )tandem ([^`\n]*)")
    assert spoken
    for line in spoken:
        name, *arguments = shlex.split(line)
        d.cli.commands[name].make_context(name, arguments)


@pytest.mark.skipif(not d.KUBECTL, reason=d.NO_KUBECTL)
def test_the_overlay_for_several_models_builds(tmp_path: Path) -> None:
    ((_, body),) = blocks("yaml")
    settings = yaml.safe_load(body)
    settings["resources"] = [path.removeprefix("../") for path in settings["resources"]]
    objects = d.kustomize(tmp_path, **settings)
    assert "qwen-tandem-router" in d.named(objects, "Service")
    for workload in d.servers(objects):
        for part in d.kubernetes_parts(objects, workload):
            assert part.environment["TANDEM_MODEL"] == "/models/Qwen3-8B"


def test_components_are_listed() -> None:
    text = (d.DEPLOY / "README.md").read_text()
    (table,) = re.findall(r"^\| Component \|.*?\n\n", text, re.M | re.S)
    assert {*re.findall(r"^\| `(\S+)`", table, re.M)} == {p.name for p in d.COMPONENTS.iterdir()}
