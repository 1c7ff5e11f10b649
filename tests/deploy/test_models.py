"""Where the objects that kustomize builds have their models from, and that they can read them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from . import deployment as d
from .test_kubernetes import containers

pytestmark = pytest.mark.skipif(not d.KUBECTL, reason=d.NO_KUBECTL)


def test_models_of_a_volume_cannot_be_written_to() -> None:
    for name in ("kubernetes-gpu", "kubernetes-pair"):
        for _, container, part in containers(d.build(d.DEPLOY / name)):
            (models,) = [m for m in container["volumeMounts"] if m["name"] == "models"]
            assert models["readOnly"]
            assert part.parse()["model"].startswith(models["mountPath"] + "/")


def test_the_download_goes_where_nodes_look() -> None:
    objects = d.build(d.DEPLOY / "download")
    (claim,) = d.of_kind(objects, "PersistentVolumeClaim")
    (job,) = d.of_kind(objects, "Job")
    (container,) = d.pod(job)["containers"]
    (model,) = [e["value"] for e in container["env"] if e["name"] == "MODEL"]
    (volume,) = [v for v in d.pod(job)["volumes"] if "persistentVolumeClaim" in v]
    assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    compile(container["command"][-1], "download", "exec")
    gpu = d.build(d.DEPLOY / "kubernetes-gpu")
    models: set[Any] = {part.parse()["model"] for _, _, part in containers(gpu)}
    assert models == {f"/models/{model.split('/')[-1]}"}
    claims = {
        volume["persistentVolumeClaim"]["claimName"]
        for workload in d.servers(gpu)
        for volume in d.pod(workload)["volumes"]
        if "persistentVolumeClaim" in volume
    }
    assert claims == {claim["metadata"]["name"]}


def test_a_model_of_the_hub_lies_on_a_claim(tmp_path: Path) -> None:
    objects = d.kustomize(tmp_path, resources=["kubernetes"], components=["components/model-hub"])
    for workload, container, part in containers(objects):
        home = part.environment["HF_HOME"]
        (mount,) = [m for m in container["volumeMounts"] if m["mountPath"] == home]
        claims = [c["metadata"]["name"] for c in workload["spec"].get("volumeClaimTemplates", ())]
        # A download into an emptyDir would evict a node's pod; and a router's pod that is made anew
        # while the hub is down could not start.
        assert mount["name"] in claims, part.where
