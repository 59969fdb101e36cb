"""Rendered overlays, as data, and what a pod's process would get of them."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
OVERLAYS = tuple(sorted(path.name for path in (ROOT / "k8s/overlays").iterdir()))
Object = dict[str, Any]


@functools.cache
def render(overlay: str) -> tuple[Object, ...]:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl is not installed: manifests cannot be rendered")
    path = ROOT / "k8s/overlays" / overlay
    made = subprocess.run([kubectl, "kustomize", str(path)], capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    return tuple(yaml.safe_load_all(made.stdout))


def of_kind(overlay: str, kind: str) -> dict[str, Object]:
    """By name."""
    return {found["metadata"]["name"]: found for found in render(overlay) if found["kind"] == kind}


def pods(overlay: str) -> Iterator[tuple[str, Object]]:
    """Each workload's name and pod template."""
    for found in render(overlay):
        if found["kind"] in ("Deployment", "StatefulSet", "Job"):
            yield found["metadata"]["name"], found["spec"]["template"]


def containers(template: Object) -> list[Object]:
    return [*template["spec"].get("initContainers", ()), *template["spec"]["containers"]]


def image_environ(target: str) -> dict[str, str]:
    """Our own variables that the image of this target sets."""
    text = (ROOT / "compose/Dockerfile").read_text().replace("\\\n", " ")
    stages = re.split(r"^FROM .*? AS (\S+)$", text, flags=re.MULTILINE)
    found = dict(zip(stages[1::2], stages[2::2], strict=True))
    return dict(re.findall(r"(KVFERRY_\w+__\w+)=(\S+)", " ".join(re.findall(r"^ENV .*$", found[target], re.MULTILINE))))


@dataclass(frozen=True)
class Pod:
    """What the kubelet tells a pod about itself."""

    name: str
    ip: str


def environ(overlay: str, container: Object, pod: Pod) -> dict[str, str]:
    """As the container's process would see it; secrets are left out."""
    made: dict[str, str] = image_environ(container["image"].rpartition("/")[2].partition(":")[0].split("-")[-1])
    for source in container.get("envFrom", ()):
        made |= of_kind(overlay, "ConfigMap")[source["configMapRef"]["name"]]["data"]
    fields = {"metadata.name": pod.name, "status.podIP": pod.ip}
    for item in container.get("env", ()):
        if "value" in item:
            made[item["name"]] = item["value"]
        elif path := item["valueFrom"].get("fieldRef", {}).get("fieldPath"):
            made[item["name"]] = fields[path]
    return made


def arguments(container: Object, environ: Mapping[str, str]) -> list[str]:
    """With `$(NAME)` replaced, as Kubernetes does."""
    return [re.sub(r"\$\((\w+)\)", lambda match: environ[match[1]], word) for word in container.get("args", ())]
