"""The containers, arguments and Kubernetes objects of ``deploy/``, read from its files."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import click
import yaml

from tandem.__main__ import cli
from tandem.commands.part_command import option_variables

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
COMPONENTS = DEPLOY / "components"
KUBECTL = shutil.which("kubectl")
NO_KUBECTL = "kubectl, which has kustomize, is not installed"
COMPOSE_FILES = (DEPLOY / "compose.yaml", DEPLOY / "compose.gpu.yaml")
# What can be applied as it is and starts parts.
OVERLAYS = (
    "kubernetes",
    "kubernetes-locked",
    "kubernetes-gpu",
    "kubernetes-pair",
    "kubernetes-hosts",
)
# Put onto the base in a test, where no overlay has it.
OPTIONAL = ("api-key", "nvidia-runtime-class", "priority", "model-image", "model-hub")
LEADER_WORKER_SET = "LeaderWorkerSet"
LISTENS = ("port", "registry_port", "metrics_port", "health_port", "kv_port")

Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Container:
    """One container: where it stands, the arguments of its ``tandem``, and its environment."""

    where: str
    arguments: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def command(self) -> str:
        return self.arguments[0]

    def parse(self) -> dict[str, Any]:
        """The command's options. Raises ``click.UsageError`` for one that it does not have."""
        name, *rest = self.arguments
        assert name in cli.commands, f"{self.where}: no command {name!r}"
        strange = {v for v in self.environment if v.startswith("TANDEM_")} - option_variables(cli)
        if strange:
            raise click.UsageError(f"{self.where}: no option is set by {sorted(strange)}")
        command = cli.commands[name]
        defaults = {
            option.name: self.environment[variable]
            for option in command.params
            for variable in variables(option)
            if variable in self.environment
        }
        return command.make_context(name, list(rest), default_map=defaults).params

    @property
    def ports(self) -> set[int]:
        """The ports in its arguments, by option."""
        values = self.parse()
        named = {argument.partition("=")[0] for argument in self.arguments}
        flags = {name: "--" + name.replace("_", "-") for name in LISTENS}
        numbers = {values[name] for name, flag in flags.items() if flag in named}
        if values.get("kv_port"):
            numbers.add(values["kv_port"] + 1)  # KV takes two a rank; all parts here have one rank
        return numbers


def variables(option: click.Parameter) -> list[str]:
    names = option.envvar
    return [names] if isinstance(names, str) else list(names or ())


@cache
def documents(path: Path) -> list[Object]:
    return list(yaml.safe_load_all(path.read_text()))


# --- Kubernetes


def build(folder: Path) -> list[Object]:
    """The objects that ``kubectl apply -k`` would apply, with the set that it makes of its first
    pods in place of a LeaderWorkerSet."""
    return [_with_pods(item) for item in build_exactly(folder)]


def _with_pods(item: Object) -> Object:
    """A StatefulSet as LeaderWorkerSet's controller makes it, with a service of its own name."""
    if item["kind"] != LEADER_WORKER_SET:
        return item
    template = item["spec"]["leaderWorkerTemplate"]["workerTemplate"]
    name = item["metadata"]["name"]
    spec = {
        "replicas": item["spec"]["replicas"],
        "serviceName": name,
        "podManagementPolicy": "Parallel",
        "selector": {"matchLabels": template["metadata"]["labels"]},
        "template": template | {"spec": template["spec"] | {"containers": []}},
    }
    variables = {
        "LWS_GROUP_SIZE": str(item["spec"]["leaderWorkerTemplate"]["size"]),
        "LWS_WORKER_INDEX": "0",
        "LWS_LEADER_ADDRESS": f"{name}-0.{name}.default",
    }
    injected = [{"name": key, "value": value} for key, value in variables.items()]
    spec["template"]["spec"]["containers"] = [
        container | {"env": [*container["env"], *injected]}
        for container in template["spec"]["containers"]
    ]
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": item["metadata"],
        "spec": spec,
    }


@cache
def build_exactly(folder: Path) -> list[Object]:
    """The objects that ``kubectl apply -k`` would apply."""
    assert KUBECTL is not None
    done = subprocess.run(
        [KUBECTL, "kustomize", str(folder)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def kustomize(folder: Path, **settings: Any) -> list[Object]:
    """Build a kustomization that is made in ``folder``; its paths are those of ``deploy/``."""
    for name in ("resources", "components"):
        paths = [
            os.path.relpath(DEPLOY / each, folder.resolve()) for each in settings.get(name, ())
        ]
        settings[name] = paths
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "kustomization.yaml").write_text(json.dumps(settings))
    return build(folder)


def of_kind(objects: list[Object], *kinds: str) -> list[Object]:
    return [item for item in objects if item["kind"] in kinds]


def named(objects: list[Object], kind: str) -> dict[str, Object]:
    return {item["metadata"]["name"]: item for item in of_kind(objects, kind)}


def workloads(objects: list[Object]) -> list[Object]:
    return of_kind(objects, "StatefulSet", "Deployment", "Job")


def servers(objects: list[Object]) -> list[Object]:
    """The workloads that run routers and nodes."""
    return of_kind(objects, "StatefulSet", "Deployment")


def pod(workload: Object) -> Object:
    """The pod spec of a workload."""
    spec: Object = workload["spec"]["template"]["spec"]
    return spec


def labels(workload: Object) -> dict[str, str]:
    """The labels of a workload's pods."""
    pod_labels: dict[str, str] = workload["spec"]["template"]["metadata"]["labels"]
    return pod_labels


def matches(selector: Object, has: dict[str, str]) -> bool:
    assert set(selector) <= {"matchLabels"}, f"{selector}: not understood here"
    return all(has.get(key) == value for key, value in selector.get("matchLabels", {}).items())


def selected(objects: list[Object], selector: Object) -> list[Object]:
    """The servers whose pods a label selector picks."""
    return [workload for workload in servers(objects) if matches(selector, labels(workload))]


def environment(objects: list[Object], workload: Object, container: Object) -> dict[str, str]:
    """As the first pod of a workload sees it; a secret's value is its name."""
    maps = named(objects, "ConfigMap")
    variables: dict[str, str] = {}
    for source in container.get("envFrom", ()):
        variables |= maps[source["configMapRef"]["name"]]["data"]
    for entry in container.get("env", ()):
        variables[entry["name"]] = entry.get("value") or _value(
            workload, container, entry["valueFrom"]
        )
    return variables


def _value(workload: Object, container: Object, source: Object) -> str:
    if "secretKeyRef" in source:
        return "secret:" + source["secretKeyRef"]["name"]
    if "resourceFieldRef" in source:
        kind, name = source["resourceFieldRef"]["resource"].split(".")
        return str(container["resources"][kind][name])
    path = source["fieldRef"]["fieldPath"]
    if path == "metadata.name":
        return f"{workload['metadata']['name']}-0"
    label = re.fullmatch(r"metadata\.labels\['(.+)'\]", path)
    assert label, f"{path}: not understood here"
    return labels(workload)[label[1]]


def _expand_variable(variables: dict[str, str], match: re.Match[str]) -> str:
    return variables[match[1]]


def kubernetes_parts(objects: list[Object], workload: Object) -> list[Container]:
    """Its containers, as its first pod sees them."""
    parts = []
    for container in pod(workload)["containers"]:
        variables = environment(objects, workload, container)
        arguments = [
            re.sub(r"\$\((\w+)\)", partial(_expand_variable, variables), argument)
            for argument in container["args"]
        ]
        where = f"{workload['metadata']['name']}/{container['name']}"
        parts.append(Container(where, tuple(arguments), variables))
    return parts


def ports(container: Object) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for port in container["ports"]}


# --- compose


def services(path: Path) -> dict[str, Object]:
    """Compose's services, with anchors and merge keys resolved."""
    compose_services: dict[str, Object] = documents(path)[0]["services"]
    return compose_services


def compose_names(path: Path) -> list[str]:
    """The services that run parts; one with another entry point only holds something for them."""
    return [name for name, service in services(path).items() if "entrypoint" not in service]


def compose_part(path: Path, name: str) -> Container:
    service = services(path)[name]
    values = {"MODELS": "/models", "MODEL": "Qwen3-0.6B"}

    def filled(text: str) -> str:
        return re.sub(r"\$\{(\w+)[^}]*\}", lambda match: values[match[1]], text)

    variables = {key: filled(value) for key, value in service.get("environment", {}).items()}
    return Container(f"{path.name}/{name}", tuple(map(filled, service["command"])), variables)


def compose_parts() -> list[Container]:
    return [compose_part(path, name) for path in COMPOSE_FILES for name in compose_names(path)]


def options_of(command: str) -> set[str]:
    """Every flag of a command."""
    options = [p for p in cli.commands[command].params if isinstance(p, click.Option)]
    return {flag for option in options for flag in (*option.opts, *option.secondary_opts)}
