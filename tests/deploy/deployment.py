"""What ``deploy/`` starts, read from its files: containers, arguments, Kubernetes objects."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import click
import yaml

from tandem.__main__ import cli

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
COMPOSE = DEPLOY / "compose.yaml"
KUBERNETES = DEPLOY / "kubernetes"
LOCKED = DEPLOY / "kubernetes-locked"
MANIFESTS = sorted(path for path in KUBERNETES.glob("*.yaml") if path.name != "kustomization.yaml")
LISTENS = ("port", "registry_port", "health_port", "kv_port")


@dataclass(frozen=True, slots=True)
class Part:
    """One container: where it stands, and the arguments of its ``tandem``."""

    where: str
    arguments: tuple[str, ...]

    def parse(self) -> dict[str, Any]:
        """The command's options. Raises ``click.UsageError`` for one that it does not have."""
        name, *rest = self.arguments
        assert name in cli.commands, f"{self.where}: no command {name!r}"
        context = cli.commands[name].make_context(name, list(rest))
        return context.params

    @property
    def ports(self) -> set[int]:
        """What it is told to listen on, in so many words."""
        given = self.parse()
        named = {argument.partition("=")[0] for argument in self.arguments}
        flags = {name: "--" + name.replace("_", "-") for name in LISTENS}
        found = {given[name] for name, flag in flags.items() if flag in named}
        if given.get("kv_port"):
            found.add(given["kv_port"] + 1)  # KV takes two a rank; all parts here have one rank
        return found


@cache
def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


def objects(*kinds: str) -> list[dict[str, Any]]:
    """The Kubernetes objects of these kinds."""
    found = [item for path in MANIFESTS for item in documents(path)]
    return [item for item in found if item["kind"] in kinds]


def workloads() -> list[dict[str, Any]]:
    return objects("Deployment", "StatefulSet")


def pod(workload: dict[str, Any]) -> dict[str, Any]:
    """The pod spec of a workload."""
    spec: dict[str, Any] = workload["spec"]["template"]["spec"]
    return spec


def kubernetes_part(workload: dict[str, Any]) -> Part:
    """Its one container, as its first pod sees the arguments."""
    name = workload["metadata"]["name"]
    (container,) = pod(workload)["containers"]
    values = {"$(POD_NAME)": f"{name}-0"} if "env" in container else {}
    arguments = container["args"]
    for variable, value in values.items():
        arguments = [argument.replace(variable, value) for argument in arguments]
    return Part(name, tuple(arguments))


def services() -> dict[str, dict[str, Any]]:
    """Compose's services, with anchors and merge keys resolved."""
    found: dict[str, dict[str, Any]] = documents(COMPOSE)[0]["services"]
    return found


def compose_part(name: str) -> Part:
    return Part(f"compose {name}", tuple(services()[name]["command"]))


def parts() -> list[Part]:
    return [compose_part(name) for name in services()] + [kubernetes_part(w) for w in workloads()]


def takes(command: str) -> set[str]:
    """Every flag of a command."""
    options = [p for p in cli.commands[command].params if isinstance(p, click.Option)]
    return {flag for option in options for flag in (*option.opts, *option.secondary_opts)}
