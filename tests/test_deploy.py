"""What `deploy/` has: its command lines are ours, its objects have the keys that are meant, and its
parts fit together. The package with Kubernetes' own schemas takes 100 MB."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from doors import ROOT, parsed

import spectune.engines.vllm
from spectune.optimizer.metrics import METRICS

KUBERNETES = ROOT / "deploy" / "kubernetes"
COMPOSE = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())
FILES = {file.name: [*yaml.safe_load_all(file.read_text())] for file in KUBERNETES.glob("*.yaml")}
OBJECTS = {(o["kind"], o.get("metadata", {}).get("name")): o for of in FILES.values() for o in of}
PODS = {
    name: o["spec"]["template"]["spec"]
    for (kind, name), o in OBJECTS.items()
    if kind == "Deployment"
}
CONTAINER = {
    *("name", "image", "command", "args", "env", "ports", "livenessProbe", "readinessProbe"),
    *("resources", "securityContext", "volumeMounts"),
}
POD = {
    *("terminationGracePeriodSeconds", "securityContext", "initContainers", "containers"),
    "volumes",
}
SERVICE = {
    *("image", "build", "user", "read_only", "tmpfs", "cap_drop", "security_opt", "restart"),
    *("depends_on", "environment", "command", "stop_grace_period", "ports", "healthcheck"),
    *("secrets", "volumes"),
}


def containers() -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    for pod in PODS.values():
        yield from ((pod, one) for one in [*pod.get("initContainers", ()), *pod["containers"]])


def command_lines() -> Iterator[list[str]]:
    for service in COMPOSE["services"].values():
        if service.get("image") == "spectune":
            yield service["command"]
    for _, one in containers():
        if one["image"].startswith("spectune") and "args" in one:
            yield one["args"]


@pytest.mark.parametrize("words", [*command_lines()], ids=lambda words: words[0])
def test_command_lines_are_ours(words: list[str]) -> None:
    assert all(isinstance(word, str) for word in words)
    parsed(words)


def test_commands_in_comments_build_images_with_extras_that_there_are() -> None:
    text = "".join(file.read_text() for file in (ROOT / "deploy").rglob("*.yaml"))
    project = (ROOT / "pyproject.toml").read_text()
    images = dict(re.findall(r"docker build -t (\S+)( --build-arg EXTRAS=\S+)? \.", text))
    used = {one["image"] for _, one in containers()} - {"vllm/vllm-openai"}
    assert used == images.keys() == {"spectune", "spectune-follow"}
    (extras,) = re.findall(r"^ARG EXTRAS=(\S+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    for name in (*extras.split(","), *shlex.split(images["spectune-follow"])[-1].split("=")[1:]):
        assert re.search(rf"^{name} = \[", project, re.MULTILINE), name


def test_pods_are_confined_and_name_what_there_is() -> None:
    for pod, one in containers():
        assert pod.keys() <= POD
        assert one.keys() <= CONTAINER
        assert pod["securityContext"]["runAsUser"] == 1000, "server and `follow` are one user"
        confined = one["securityContext"]
        assert confined["readOnlyRootFilesystem"]
        assert not confined["allowPrivilegeEscalation"]
        volumes = {volume["name"] for volume in pod["volumes"]}
        assert {mount["name"] for mount in one["volumeMounts"]} <= volumes
        ports = {port["name"] for port in one.get("ports", ())}
        probes = [one[key]["httpGet"]["port"] for key in one if key.endswith("Probe")]
        assert set(probes) <= ports
    for (kind, name), o in OBJECTS.items():
        if kind == "Service":
            labels = OBJECTS["Deployment", name]["spec"]["template"]["metadata"]["labels"]
            assert o["spec"]["selector"] == labels
            assert OBJECTS["Deployment", name]["spec"]["selector"]["matchLabels"] == labels
    (kustomization,) = FILES["kustomization.yaml"]
    assert {*kustomization["resources"], "kustomization.yaml"} == set(FILES)


def test_files_of_the_agent_fit_into_the_folder() -> None:
    """Beyond its limit the pod would be evicted."""
    source = Path(spectune.engines.vllm.__file__).with_name("agent.py").read_text()
    (sizes,) = re.findall(r"^FILE_BYTES, MAX_FILES = (\d+) << (\d+), (\d+)", source, re.MULTILINE)
    file, shift, most = map(ast.literal_eval, sizes)
    (volume,) = (v for v in PODS["vllm"]["volumes"] if v["name"] == "spectune")
    (follow,) = (one for one in PODS["vllm"]["containers"] if one["name"] == "follow")
    (kept,) = re.findall(r"--keep-files (\d+)MB", " ".join(follow["args"]))
    limit = int(volume["emptyDir"]["sizeLimit"].removesuffix("Gi")) << 30
    assert (file << shift) * (most + 1) + int(kept) * 10**6 < limit


def test_alerts_ask_for_metrics_that_there_are() -> None:
    (group,) = OBJECTS["PrometheusRule", "spectune"]["spec"]["groups"]
    assert len(group["rules"]) == 6
    for rule in group["rules"]:
        named = set(re.findall(r"\bspectune_\w+", rule["expr"]))
        assert named
        assert named <= set(METRICS)
        for labels in re.findall(r"by \(([\w, ]+)\)", rule["expr"]):
            assert all(set(labels.split(", ")) <= set(METRICS[name][1]) for name in named)
        told = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
        assert all(told <= set(METRICS[name][1]) for name in named)


def test_the_services_of_compose_name_what_there_is() -> None:
    services = COMPOSE["services"]
    for service in services.values():
        assert service.keys() <= SERVICE
        assert set(service.get("depends_on", ())) <= set(services)
        assert set(service.get("secrets", ())) <= set(COMPOSE["secrets"])
        files = {word.removeprefix("/run/secrets/") for word in service.get("command", ())
                 if word.startswith("/run/secrets/")}  # fmt: skip
        assert files == set(service.get("secrets", ()))
        named = {volume.split(":")[0] for volume in service["volumes"] if volume[0] not in "$/."}
        assert named <= set(COMPOSE["volumes"])
