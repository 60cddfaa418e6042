"""deploy/: the chart, rendered as Helm does it, against the schemas of Kubernetes, and its values against the code.

Helm itself is no package of Python's: a renderer of Go's templates stands in for it. The resources of KEDA, KServe, the
Prometheus operator, the inference extension and LeaderWorkerSet have no schema here; what the chart says in them is
checked by hand.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from slipstream.cli import build_parser
from slipstream.commands.serve import settings_of
from slipstream.commands.worker import ranks_here
from slipstream.core.config import CacheConfig, ServingConfig
from slipstream.core.config_parse import config_from_values
from slipstream.core.metric_aliases import ALIASES
from slipstream.core.stats import METRICS

helm = pytest.importorskip("gotpl.exts.helm", reason="needs gotpl, which needs Python 3.11")
kubernetes_validate = pytest.importorskip("kubernetes_validate")

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy/helm/slipstream"
EVERYTHING: dict[str, Any] = {
    "model": {"source": "Llama-3.1-8B-Instruct", "aliases": ["gpt-4o"], "hubTokenSecret": "hub"},
    "settings": {"max_model_len": 32768, "kv_cache_dtype": "fp8", "enable_prefix_caching": True},
    "gpus": 2,
    "resources": {"requests": {"cpu": "8"}, "limits": {"memory": "64Gi"}},
    "volume": {"existingClaim": "models"},
    "gateway": {
        "apiKeySecret": "keys",
        "allowedHosts": ["llm.example.com"],
        "extraArguments": ["--tool-parser", "hermes"],
    },
    "tracing": {"otlpEndpoint": "http://collector:4318"},
    "metrics": {"podMonitor": True},
    "autoscaling": {"enabled": True},
    "inferencePool": {"enabled": True},
    "kvEvents": {"enabled": True, "routerLabels": {"app": "router"}},
    "podDisruptionBudget": {"enabled": True},
    "podAnnotations": {"team": "search"},
    "nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-H200"},
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
    "imagePullSecrets": [{"name": "registry"}],
}

GROUP: dict[str, Any] = {
    **EVERYTHING,
    "settings": {"max_model_len": 32768},
    "nodes": {"count": 2, "secret": "ranks"},
    "podDisruptionBudget": {"enabled": False},
}
# the fields of leaderworkerset.x-k8s.io/v1, as api/leaderworkerset/v1/leaderworkerset_types.go of kubernetes-sigs/lws
# has them: a kind, the accepted values, or the fields below
LEADER_WORKER_SET: dict[str, Any] = {
    "replicas": int,
    "startupPolicy": {"LeaderCreated", "LeaderReady"},
    "rolloutStrategy": {
        "type": {"RollingUpdate"},
        "rollingUpdateConfiguration": {"partition": int, "maxUnavailable": int, "maxSurge": int},
    },
    "networkConfig": {"subdomainPolicy": {"Shared", "UniquePerReplica"}},
    "leaderWorkerTemplate": {
        "leaderTemplate": "PodTemplate",
        "workerTemplate": "PodTemplate",
        "size": int,
        "restartPolicy": {"RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"},
        "subGroupPolicy": {"subGroupPolicyType": {"LeaderWorker", "LeaderExcluded"}, "subGroupSize": int},
    },
}


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    both = {key: merged(base[key], over[key]) for key in base.keys() & over.keys() if isinstance(base[key], dict)}
    return {**base, **over, **both}


@cache
def default_values() -> dict[str, Any]:
    return yaml.safe_load((CHART / "values.yaml").read_text())


def rendered(values: Mapping[str, Any], release: str = "slipstream") -> dict[str, Any]:
    """The resources by kind."""
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    given = merged(default_values(), values)
    context = {
        "Values": given,
        "Chart": {"Name": chart["name"], "Version": chart["version"], "AppVersion": chart["appVersion"]},
        "Release": {"Name": release, "Namespace": "models", "Service": "Helm"},
    }
    sources = {path.name: path.read_text() for path in (CHART / "templates").iterdir()}
    engine = helm.HelmTemplateEngine(sources, strict=True)
    texts = engine.render({name: context for name in sources if not name.startswith("_")})
    assert f"{release} serves" in texts.pop("NOTES.txt") or release != "slipstream"
    found = [one for text in texts.values() for one in yaml.safe_load_all(text) if one]
    assert len({one["kind"] for one in found}) == len(found)
    return {one["kind"]: one for one in found}


def container_of(resources: Mapping[str, Any]) -> dict[str, Any]:
    [container] = pod_of(resources)["spec"]["containers"]
    return container


def pod_of(resources: Mapping[str, Any], role: str = "leader") -> dict[str, Any]:
    if "Deployment" in resources:
        return resources["Deployment"]["spec"]["template"]
    return resources["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"][f"{role}Template"]


def check_fields(given: Mapping[str, Any], accepted: Mapping[str, Any]) -> None:
    for name, value in given.items():
        assert name in accepted, name
        kind = accepted[name]
        if isinstance(kind, dict):
            check_fields(value, kind)
        elif kind == "PodTemplate":
            template = {"apiVersion": "v1", "kind": kind, "metadata": {"name": "pod"}, "template": value}
            kubernetes_validate.validate(template, "1.30", strict=True)
        else:
            assert isinstance(value, kind) if isinstance(kind, type) else value in kind, (name, value)


@pytest.mark.parametrize("values", [{}, EVERYTHING, {"gpus": 0}], ids=["defaults", "everything", "cpu"])
def test_kubernetes_takes_what_is_rendered(values: dict[str, Any]) -> None:
    resources = rendered(values)
    for kind in {"Deployment", "Service", "PodDisruptionBudget", "NetworkPolicy"} & resources.keys():
        kubernetes_validate.validate(resources[kind], "1.30", strict=True)
    names = {one["metadata"]["name"] for one in resources.values()}
    assert names == {"slipstream"}, names
    pod = resources["Deployment"]["spec"]["template"]
    mounted = {mount["name"] for mount in container_of(resources)["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["spec"]["volumes"]}
    assert resources["Service"]["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    ports = {port["name"] for port in container_of(resources)["ports"]}
    assert {port["targetPort"] for port in resources["Service"]["spec"]["ports"]} <= ports


def test_several_nodes_are_a_leader_worker_set() -> None:
    """A group of two pods with two GPUs each: the command lines fit together, and only the leader gets requests."""
    resources = rendered(GROUP)
    assert "Deployment" not in resources
    found = resources["LeaderWorkerSet"]
    assert found["apiVersion"] == "leaderworkerset.x-k8s.io/v1"
    check_fields(found["spec"], LEADER_WORKER_SET)
    template = found["spec"]["leaderWorkerTemplate"]
    assert (template["size"], template["restartPolicy"]) == (2, "RecreateGroupOnPodRestart")
    assert found["spec"]["startupPolicy"] == "LeaderCreated", "a leader is ready only with its workers"
    service = resources["Service"]
    assert found["metadata"]["name"] != service["metadata"]["name"], "the controller's own service has the group's name"
    leader, worker = pod_of(resources), pod_of(resources, "worker")
    for pod in (leader, worker):
        assert pod["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 2
        mounted = {mount["name"] for mount in pod["spec"]["containers"][0]["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["spec"]["volumes"]}
    selectors = [service["spec"]["selector"]]
    selectors += [resources[kind]["spec"]["selector"]["matchLabels"] for kind in ("InferencePool", "PodMonitor")]
    for selector in selectors:
        assert selector.items() <= leader["metadata"]["labels"].items()
        assert not selector.items() <= worker["metadata"]["labels"].items(), "it answers no client"
    assert resources["ScaledObject"]["spec"]["scaleTargetRef"].items() >= {
        ("kind", "LeaderWorkerSet"),
        ("name", found["metadata"]["name"]),
    }
    served, [worker_container] = container_of(resources), worker["spec"]["containers"]
    assert served["readinessProbe"]["httpGet"]["path"] == "/ready" and "readinessProbe" not in worker_container
    config = config_from_values(settings_of(build_parser().parse_args(served["args"][1:])), is_complete=False)
    arguments = build_parser().parse_args(worker_container["args"][1:])
    variables = {"LWS_LEADER_ADDRESS": "leader", "LWS_GROUP_SIZE": str(template["size"]), "LWS_WORKER_INDEX": "1"}
    ranks = ranks_here(arguments, variables)
    assert [one["rank"] for one in ranks] == [2, 3]
    assert {one["world_size"] for one in ranks} == {config.parallel.tensor_parallel_size} == {4}
    assert {one["port"] for one in ranks} == {int(config.parallel.rank_address.rpartition(":")[2])}
    assert config.parallel.num_nodes == template["size"]
    assert config.parallel.rank_secret_file == arguments.secret_file
    assert {"name": "rank-secret", "mountPath": str(Path(arguments.secret_file).parent), "readOnly": True} in (
        worker_container["volumeMounts"]
    )
    assert 60 < arguments.drain_timeout < worker["spec"]["terminationGracePeriodSeconds"]


@pytest.mark.parametrize("values", [GROUP, {"gpus": 4}], ids=["group", "pod"])
def test_stages_share_the_gpus(values: dict[str, Any]) -> None:
    container = container_of(rendered({**values, "settings": {"pipeline_parallel_size": 2}}))
    config = config_from_values(settings_of(build_parser().parse_args(container["args"][1:])), is_complete=False)
    assert (config.parallel.tensor_parallel_size, config.parallel.pipeline_parallel_size) == (2, 2)


def test_which_pods_reach_ranks_and_events() -> None:
    """Clients reach the servers' ports, ranks each other, and the router alone the events."""
    assert "NetworkPolicy" not in rendered({})
    with pytest.raises(Exception, match=r"kvEvents\.routerLabels is missing"):
        rendered({"kvEvents": {"enabled": True}})
    resources = rendered(GROUP)
    clients, group, router = resources["NetworkPolicy"]["spec"]["ingress"]
    assert {one["port"] for one in clients["ports"]} == {9000, 8000, 8001, 8002} and "from" not in clients
    [of_group], [of_router] = group["from"], router["from"]
    for role in ("leader", "worker"):
        assert of_group["podSelector"]["matchLabels"].items() <= pod_of(resources, role)["metadata"]["labels"].items()
    assert of_router["podSelector"]["matchLabels"] == {"app": "router"}
    container = container_of(resources)
    config = config_from_values(settings_of(build_parser().parse_args(container["args"][1:])), is_complete=False)
    endpoints = (config.cache.events_endpoint, config.cache.events_replay_endpoint)
    assert [int(one.rpartition(":")[2]) for one in endpoints] == [one["port"] for one in router["ports"]]
    assert config.cache.events_topic == "kv@$(POD_IP):9000@gpt-4o"
    assert "POD_IP" in {one["name"] for one in container["env"]}


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"gpus": 8}, "nodes.count x gpus is 16; accepted: up to 8"),
        ({"nodes": {"secret": ""}}, "nodes.secret is missing"),
        ({"settings": {"num_nodes": 2}}, "settings.num_nodes; accepted"),
        ({"settings": {"pipeline_parallel_size": 3}}, "accepted: a divisor of nodes.count x gpus, 4"),
        ({"podDisruptionBudget": {"enabled": True}}, "podDisruptionBudget.enabled; accepted"),
        ({"kvEvents": {"replayPort": 5557}}, "kvEvents.replayPort is kvEvents.port"),
    ],
)
def test_the_chart_refuses_what_does_not_fit_together(values: dict[str, Any], reason: str) -> None:
    with pytest.raises(Exception, match=re.escape(reason)):
        rendered(merged(GROUP, values))


def test_large_numbers_are_written_out() -> None:
    """Helm reads numbers of values files as floating point, which it prints as 1.048576e+06."""
    settings = {"max_model_len": 1048576.0, "memory_bytes": 34359738368.0, "gpu_memory_utilization": 0.85}
    given = build_parser().parse_args(container_of(rendered({"settings": settings}))["args"][1:])
    assert {f"{name}={value:g}" if value < 1 else f"{name}={int(value)}" for name, value in settings.items()} <= set(
        given.set
    )


@pytest.mark.parametrize("values", [{}, EVERYTHING], ids=["defaults", "everything"])
def test_the_command_is_one_that_slipstream_takes(values: dict[str, Any]) -> None:
    program, *arguments = container_of(rendered(values, "llm"))["args"]
    assert program == "slipstream"
    given = build_parser().parse_args(arguments)
    assert (given.command, given.host, given.openai_port) == ("serve", "0.0.0.0", 9000)
    config = config_from_values(settings_of(given), is_complete=False)
    assert "llm-slipstream.models.svc" in given.allowed_host
    if values:
        assert given.model == "/models/Llama-3.1-8B-Instruct" and given.alias == ["gpt-4o=llm"]
        assert config.parallel.tensor_parallel_size == 2 and config.model.max_model_len == 32768
        assert config.serving.otlp_endpoint == given.otlp_endpoint == "http://collector:4318"
        assert config.cache.enable_prefix_caching and config.cache.dtype == "fp8_e4m3"
        assert "llm.example.com" in given.allowed_host and given.tool_parser == "hermes"
        assert given.api_key_file == Path("/run/slipstream/keys")


def test_the_gpus_of_a_pod_are_its_limit() -> None:
    assert container_of(rendered({}))["resources"] == {"limits": {"nvidia.com/gpu": 1}}
    both = {"limits": {"nvidia.com/gpu": 2, "memory": "64Gi"}, "requests": {"cpu": "8"}}
    assert container_of(rendered(EVERYTHING))["resources"] == both
    assert not container_of(rendered({"gpus": 0}))["resources"]


def test_pods_run_as_the_user_of_the_image_and_write_only_where_they_may() -> None:
    resources = rendered({})
    pod, container = resources["Deployment"]["spec"]["template"]["spec"], container_of(resources)
    dockerfile = (ROOT / "Dockerfile").read_text()
    user = re.search(r"^USER (\d+):(\d+)$", dockerfile, re.M)
    assert user is not None
    assert (pod["securityContext"]["runAsUser"], pod["securityContext"]["runAsGroup"]) == tuple(map(int, user.groups()))
    assert pod["securityContext"]["runAsNonRoot"] and container["securityContext"]["readOnlyRootFilesystem"]
    home = re.search(r"^ENV HOME=(\S+)$", dockerfile, re.M)
    writable = {mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")}
    assert home is not None and writable == {"/tmp", "/dev/shm", home[1]}


def test_a_pod_has_the_time_to_drain() -> None:
    values = default_values()
    assert values["terminationGracePeriodSeconds"] >= ServingConfig().exit_timeout_s + 5 + 10
    probes = container_of(rendered({}))
    assert probes["startupProbe"]["periodSeconds"] * probes["startupProbe"]["failureThreshold"] == 1800
    assert probes["readinessProbe"]["httpGet"]["path"] == "/ready", "the gateway's, which asks for the model"


def test_autoscaling_asks_for_metrics_that_exist() -> None:
    resources = rendered(EVERYTHING)
    triggers = resources["ScaledObject"]["spec"]["triggers"]
    queries = [trigger["metadata"]["query"] for trigger in triggers]
    asked = {name for query in queries for name in re.findall(r"slipstream_\w+", query)}
    assert asked == {"slipstream_requests_waiting", "slipstream_kv_utilization"}
    assert asked <= {spec.family for spec in METRICS}
    assert all(isinstance(trigger["metadata"]["threshold"], str) for trigger in triggers), "KEDA reads text"
    assert "replicas" not in resources["Deployment"]["spec"], "Helm and KEDA would fight over it"
    assert resources["ScaledObject"]["spec"]["scaleTargetRef"]["name"] == resources["Deployment"]["metadata"]["name"]


def test_the_pool_and_the_monitor_find_the_pods() -> None:
    resources = rendered(EVERYTHING)
    labels = resources["Deployment"]["spec"]["template"]["metadata"]["labels"]
    for kind in ("InferencePool", "PodMonitor", "PodDisruptionBudget"):
        assert resources[kind]["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert resources["InferencePool"]["spec"]["targetPorts"] == [{"number": 9000}]


def test_the_schema_knows_every_value_and_refuses_others() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads((CHART / "values.schema.json").read_text())
    for values in ({}, EVERYTHING, GROUP):
        jsonschema.validate(merged(default_values(), values), schema)
    assert schema["properties"].keys() - {"global"} == default_values().keys()
    wrongs = [{"gpu": 1}, {"gpus": 3}, {"nodes": {"count": 3}}, {"kvEvents": {"port": 80}}]
    for wrong in (*wrongs, {"tracing": {"otlpEndpoint": "collector"}}, {"model": {"source": ""}}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(merged(default_values(), wrong), schema)


def test_the_runtime_of_kserve_starts_what_slipstream_takes() -> None:
    runtime = yaml.safe_load((ROOT / "deploy/kserve/servingruntime.yaml").read_text())
    [container] = runtime["spec"]["containers"]
    program, *arguments = container["args"]
    given = build_parser().parse_args(arguments)
    assert (program, given.command, given.model) == ("slipstream", "serve", "/mnt/models")
    assert container["ports"][0]["containerPort"] == given.openai_port == container["readinessProbe"]["httpGet"]["port"]
    service = yaml.safe_load((ROOT / "deploy/kserve/inferenceservice.yaml").read_text())
    model = service["spec"]["predictor"]["model"]
    assert model["runtime"] == runtime["metadata"]["name"]
    assert model["modelFormat"]["name"] in {one["name"] for one in runtime["spec"]["supportedModelFormats"]}


def test_the_examples_for_the_inference_extension_fit_the_chart() -> None:
    values = merged(default_values(), {**EVERYTHING, "model": {"aliases": []}})
    resources = rendered(values, "llama")
    route = yaml.safe_load((ROOT / "deploy/inference-gateway/httproute.yaml").read_text())
    [backend] = route["spec"]["rules"][0]["backendRefs"]
    pool = resources["InferencePool"]
    assert (backend["kind"], backend["name"]) == (pool["kind"], pool["metadata"]["name"])
    assert pool["apiVersion"].startswith(f"{backend['group']}/")
    picker = yaml.safe_load((ROOT / "deploy/inference-gateway/endpointpicker.yaml").read_text())
    plugins = {one["type"]: one.get("parameters", {}) for one in picker["plugins"]}
    events = plugins["precise-prefix-cache-producer"]
    assert events["kvEventsConfig"]["podDiscoveryConfig"]["socketPort"] == values["kvEvents"]["port"]
    assert events["tokenProcessorConfig"]["blockSize"] == CacheConfig().block_size
    [topic] = [one for one in container_of(resources)["args"] if one.startswith("kv_events_topic=")]
    assert topic.removeprefix("kv_events_topic=").startswith(events["kvEventsConfig"]["topicFilter"])
    named = [one["pluginRef"] for one in picker["schedulingProfiles"][0]["plugins"]]
    for source in picker["dataLayer"]["sources"]:
        named += [source["pluginRef"], *(one["pluginRef"] for one in source["extractors"])]
    assert set(named) <= plugins.keys()
    text = (ROOT / "deploy/inference-gateway/endpointpicker.yaml").read_text()
    assert set(re.findall(r"vllm:\w+", text)) <= {alias.family for aliases in ALIASES.values() for alias in aliases}
