"""Every overlay is valid Kubernetes, and keeps what we promise of our pods."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

import kubernetes_validate
import pytest
import yaml

from kvferry.common.config import Config, load_config
from kvferry.services.local import cli
from kvferry.services.rpc import probe as rpc_probe
from tests.k8s.manifests import (
    OVERLAYS,
    ROOT,
    Object,
    Pod,
    arguments,
    containers,
    environ,
    image_environ,
    of_kind,
    pods,
    render,
)

VERSIONS = ("1.31", "1.37")
TLS_SECRET = "kvferry-rpc-tls"  # made by whoever makes certificates
CUSTOM = {"ServiceMonitor", "PrometheusRule"}  # of the Prometheus operator: no schema in Kubernetes itself

each_overlay = pytest.mark.parametrize("overlay", OVERLAYS)


@each_overlay
@pytest.mark.parametrize("version", VERSIONS)
def test_valid_for_this_version_of_kubernetes(overlay: str, version: str) -> None:
    assert len(render(overlay)) > 15
    for found in render(overlay):
        if found["kind"] not in CUSTOM:
            kubernetes_validate.validate(found, version, strict=True)


def test_all_kustomizations_are_part_of_an_overlay() -> None:
    used = "\n".join(path.read_text() for path in (ROOT / "k8s").rglob("kustomization.yaml"))
    for path in (ROOT / "k8s").rglob("kustomization.yaml"):
        if path.parent.parent.name != "overlays":
            assert f"{path.parent.name}\n" in used, path
        for file in path.parent.glob("*.yaml"):
            assert file == path or file.name in used or file.name == "adapter-rules.yaml", file


@each_overlay
def test_every_container_is_locked_down(overlay: str) -> None:
    for name, template in pods(overlay):
        assert template["spec"]["securityContext"]["runAsNonRoot"], name
        assert template["spec"]["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        for container in containers(template):
            security = container["securityContext"]
            assert security["readOnlyRootFilesystem"], name
            assert not security["allowPrivilegeEscalation"], name
            assert security["capabilities"]["drop"] == ["ALL"], name


@each_overlay
def test_what_refers_to_something_finds_it(overlay: str) -> None:
    templates = dict(pods(overlay))
    for kind in ("Service", "PodDisruptionBudget", "NetworkPolicy"):
        for name, found in of_kind(overlay, kind).items():
            selector = found["spec"].get("podSelector") or found["spec"]["selector"]
            assert any(_selects(selector, template) for template in templates.values()), f"{kind} {name} selects no pod"
    for name, found in of_kind(overlay, "NetworkPolicy").items():
        for rule in found["spec"]["ingress"]:
            for peer in rule.get("from", ()):
                if "podSelector" in peer:
                    assert any(_selects(peer["podSelector"], t) for t in templates.values()), f"{name}: {peer}"
    for name, found in of_kind(overlay, "HorizontalPodAutoscaler").items():
        target = found["spec"]["scaleTargetRef"]
        assert target["name"] in of_kind(overlay, target["kind"]), name
    claims, maps, secrets = (of_kind(overlay, k) for k in ("PersistentVolumeClaim", "ConfigMap", "Secret"))
    for template in templates.values():
        volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
        for volume in volumes.values():
            if "persistentVolumeClaim" in volume:
                assert volume["persistentVolumeClaim"]["claimName"] in claims
            if "configMap" in volume:
                assert volume["configMap"]["name"] in maps
            if (secret := volume.get("secret", {}).get("secretName")) is not None:
                assert secret in {*secrets, TLS_SECRET}
        for container in containers(template):
            assert {mount["name"] for mount in container["volumeMounts"]} <= set(volumes)
            assert all(source["configMapRef"]["name"] in maps for source in container.get("envFrom", ()))
            for item in container.get("env", ()):
                if (ref := item.get("valueFrom", {}).get("secretKeyRef")) is not None:
                    assert ref["key"] in secrets[ref["name"]]["stringData"]


@each_overlay
def test_probes_and_the_grace_period_fit_what_the_process_does(overlay: str) -> None:
    for name, found in of_kind(overlay, "Deployment").items():
        if name == "redis":
            continue
        spec = found["spec"]["template"]["spec"]
        (container,) = spec["containers"]
        config = load_config(environ=environ(overlay, container, Pod("pod-0", "10.0.0.1")))
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        pre_stop_s = int(container["lifecycle"]["preStop"]["exec"]["command"][-1]) if "lifecycle" in container else 0
        assert spec["terminationGracePeriodSeconds"] >= pre_stop_s + config.node.drain_s + 10, name
        assert container["startupProbe"]["periodSeconds"] * container["startupProbe"]["failureThreshold"] >= 300
        if name == "gateway":
            assert ports == {"http": config.gateway.port}
            assert [container[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "readiness", "liveness")] == [
                "/health",
                "/ready",
                "/health",
            ]
        else:
            assert ports == {"grpc": config.node.node_port, "metrics": config.node.metrics_port}
            assert _asked(container["startupProbe"]) == _asked(container["readinessProbe"])
            assert _asked(container["readinessProbe"]) == (config.node.node_port, "")
            assert _asked(container["livenessProbe"]) == (config.node.node_port, "liveness")
            has_tls = config.cluster.rpc_tls_cert is not None
            kinds = [{"grpc", "exec"} & set(container[f"{kind}Probe"]) for kind in ("startup", "readiness", "liveness")]
            assert kinds == [{"exec" if has_tls else "grpc"}] * 3, "the kubelet's gRPC probes know no TLS"


def _asked(probe: Object) -> tuple[int, str]:
    """Port and service of gRPC's health."""
    if "grpc" in probe:
        return probe["grpc"]["port"], probe["grpc"].get("service", "")
    *command, target = probe["exec"]["command"]
    assert command == ["python", "-m", rpc_probe.__name__]
    url = urlsplit(target)
    assert (url.scheme, url.hostname) == ("grpc", "127.0.0.1")
    return int(url.port or 0), url.path.removeprefix("/")


def test_secrets_are_mounted_where_the_configuration_looks_for_them() -> None:
    templates = dict(pods("secured"))
    for name in ("gateway", "prefill", "decode"):
        spec = templates[name]["spec"]
        (container,) = spec["containers"]
        cluster = load_config(environ=environ("secured", container, Pod("pod-0", "10.0.0.1"))).cluster
        keys = {"tls.crt": cluster.rpc_tls_cert, "tls.key": cluster.rpc_tls_key, "ca.crt": cluster.rpc_tls_ca}
        for key, path in keys.items():
            assert _mounted(spec, container, str(path)) == (TLS_SECRET, key), name
    spec = templates["gateway"]["spec"]
    (container,) = spec["containers"]
    gateway = load_config(environ=environ("secured", container, Pod("pod-0", "10.0.0.1"))).gateway
    secret, key = _mounted(spec, container, str(gateway.api_keys_file))
    assert key in of_kind("secured", "Secret")[secret]["stringData"]


def _mounted(spec: Object, container: Object, path: str) -> tuple[str, str]:
    """The Secret and its key that the container's process finds at `path`."""
    folder, _, key = path.rpartition("/")
    (mount,) = (mount for mount in container["volumeMounts"] if mount["mountPath"] == folder)
    assert "subPath" not in mount, "such a mount never changes"
    (volume,) = (volume for volume in spec["volumes"] if volume["name"] == mount["name"])
    return volume["secret"]["secretName"], key


@each_overlay
def test_every_command_is_one_that_the_product_has(overlay: str) -> None:
    """The rendered arguments parse, and the rendered environment is a configuration."""
    for name, template in pods(overlay):
        for container in containers(template):
            if name == "redis":
                continue
            variables = environ(overlay, container, Pod("pod-0", "10.0.0.1"))
            config: Config = load_config(environ=variables)
            is_cluster = "redis" in of_kind(overlay, "StatefulSet")
            assert config.cluster.redis_url == "redis://redis:6379/0" + "?cluster=true" * is_cluster
            assert is_cluster != ("redis" in of_kind(overlay, "Deployment"))
            assert "redis" in of_kind(overlay, "Service")
            cli._parser().parse_all(arguments(container, variables))


@pytest.mark.parametrize("overlay", ["ha", "secured"])
def test_the_masters_of_the_redis_cluster_find_one_another(overlay: str) -> None:
    spec = of_kind(overlay, "StatefulSet")["redis"]["spec"]
    (volume,) = (volume for volume in spec["template"]["spec"]["volumes"] if "configMap" in volume)
    server, join = spec["template"]["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in server["ports"]}
    assert ports == {"redis": 6379, "bus": 16379}
    peers = next(item["value"] for item in join["env"] if item["name"] == "PEERS").split()
    assert peers == [f"redis-{n}.{spec['serviceName']}:{ports['redis']}" for n in range(spec["replicas"])]
    service = of_kind(overlay, "Service")[spec["serviceName"]]["spec"]
    assert service["clusterIP"] == "None"
    assert service["publishNotReadyAddresses"], "no pod is ready before it has found the others"
    (rule,) = of_kind(overlay, "NetworkPolicy")[spec["serviceName"]]["spec"]["ingress"]
    assert {port["port"] for port in rule["ports"]} == set(ports)
    folder, _, file = join["command"][-1].rpartition("/")
    assert {"name": volume["name"], "mountPath": folder, "readOnly": True} in join["volumeMounts"]
    assert file in of_kind(overlay, "ConfigMap")[volume["configMap"]["name"]]["data"]


@each_overlay
def test_the_kv_pool_fits_into_the_shared_memory_of_its_pod(overlay: str) -> None:
    for name, template in pods(overlay):
        for volume in template["spec"]["volumes"]:
            if volume["name"] == "shm":
                (container,) = template["spec"]["containers"]
                limit = _bytes(container["resources"]["limits"]["memory"])
                assert _bytes(volume["emptyDir"]["sizeLimit"]) <= limit, name
                config = load_config(environ=environ(overlay, container, Pod("pod-0", "10.0.0.1")))
                assert (config.engine.kv_cache_memory or 2**29) < _bytes(volume["emptyDir"]["sizeLimit"]), name


def test_a_gpu_pod_has_one_gpu_and_three_cores() -> None:
    found = [t for _, t in pods("gpu-multi-pool") if "kvferry.io/pool" in t["metadata"]["labels"]]
    assert {t["metadata"]["labels"]["kvferry.io/pool"] for t in found} == {"prefill", "decode", "decode-long"}
    for template in found:
        requests = template["spec"]["containers"][0]["resources"]["requests"]
        assert (requests["nvidia.com/gpu"], requests["cpu"]) == ("1", "3")
        assert any("rdma" in name for name in requests)


def test_the_images_ports_are_those_of_the_manifests() -> None:
    assert image_environ("worker")["KVFERRY_NODE__NODE_PORT"] == "7000"
    assert image_environ("worker")["KVFERRY_NODE__NODE_HOST"] == "0.0.0.0"
    assert image_environ("gateway")["KVFERRY_GATEWAY__HOST"] == "0.0.0.0"


def test_the_autoscalers_read_metrics_that_the_adapter_makes_of_ours() -> None:
    rules = yaml.safe_load((ROOT / "k8s/components/autoscaling/adapter-rules.yaml").read_text())["rules"]["custom"]
    made = {rule["name"]["as"] for rule in rules}
    read = {
        metric["pods"]["metric"]["name"]
        for found in of_kind("gpu-multi-pool", "HorizontalPodAutoscaler").values()
        for metric in found["spec"]["metrics"]
        if metric["type"] == "Pods"
    }
    assert read == made
    sources = "\n".join(path.read_text() for path in Path(ROOT / "services/node").glob("*.py"))
    for rule in rules:
        series = rule["seriesQuery"].partition("{")[0].removeprefix("kvferry:").removesuffix("_sum")
        assert f'"{series}"' in sources or f'"kvferry:{series}"' in sources, f"no node metric {series}"


def _selects(selector: Object, template: Object) -> bool:
    wanted = selector.get("matchLabels", selector)
    return bool(wanted.items() <= template["metadata"]["labels"].items())


def _bytes(text: str) -> int:
    units = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30}
    return int(text[:-2]) * units[text[-2:]]
