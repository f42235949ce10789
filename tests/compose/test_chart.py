"""The Helm chart: Kubernetes would accept what it renders, and our processes would accept what they are given.

No cluster runs here. The custom resources (Strimzi, KEDA, Prometheus operator) are checked for what they say, since
their schemas are not part of Kubernetes.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ByteSize, TypeAdapter
from typer.testing import CliRunner

from relaygr.admission.scenarios import uses_pool
from relaygr.chart_catalogue import catalogue
from relaygr.cli.app import app
from relaygr.client import __version__
from relaygr.cluster.rights import Role, rights_of
from relaygr.runtime.http_server import ANY_ADDRESS
from relaygr.schemas.topics import CATALOGUE
from relaygr.settings import Settings, load
from relaygr.worker.process.allocation import queues_bytes
from relaygr.worker.supervisor.supervisor import STANDBY_STOP_S
from tests.worlds.chart import CHART, EXAMPLES, RELEASE, Helm, Rendered, example, helm_is_installed, merged
from tests.worlds.compose import ALERTS, alert_expressions, exported_metrics, image_environment, metrics_in
from tests.worlds.pool import needs_mooncake, unknown_options

pytestmark = pytest.mark.skipif(not helm_is_installed(), reason="helm-python-sdk has no wheel for this machine")

OLDEST, NEWEST = "1.27", "1.37"
"""Versions of Kubernetes: the oldest one that Chart.yaml allows, and the newest one with schemas."""
CUSTOM = ("monitoring.coreos.com/", "kafka.strimzi.io/", "keda.sh/")
WORKERS = ("worker", "pre-infer")
PROCESSES = (*WORKERS, "trigger", "lag", "gateway", "ui")
LIBRARIES_BYTES = 2**29
EVERYTHING: dict[str, Any] = {
    "settings": {"scenarios": {"home": {"pre_infer": "pool"}}},
    "preInfer": {"replicas": 1},
    "monitoring": {"serviceMonitor": True, "prometheusRule": True},
    "networkPolicy": {
        "enabled": True,
        "metricsFrom": [{"namespaceSelector": {}}],
        "callersFrom": [{"podSelector": {}}],
    },
    "gateway": {"enabled": True, "tokenSecret": "gateway-token"},
    "ui": {"enabled": True, "tokenSecret": "ui-token"},
    "pool": {"enabled": True, "secret": "pool-key"},
    "strimzi": {"users": ["trigger", "worker", "pre-infer", "lag", "gateway", "ui", "history-publisher"]},
    "keda": {"prometheus": "http://prometheus:9090", "trigger": {"enabled": True}, "worker": {"enabled": True}},
    "worker": {"accelerator": {"resource": "huawei.com/Ascend310P"}, "podAnnotations": {"a": "b"}},
    "extraEnv": [{"name": "RELAYGR_SECURITY__KEY_PASSWORD", "valueFrom": {"secretKeyRef": {"name": "k", "key": "p"}}}],
}
OVERRIDES = {
    "topic_settings": {
        "workers": {"segment.bytes": 52428800, "segment.ms": None, "unclean.leader.election.enable": True},
        "ranking": {"retention.ms": "1200000", "min.insync.replicas": 2},
        "history": {"min.cleanable.dirty.ratio": 0.05},
    }
}
CASES = {
    **{name: example(name) for name in EXAMPLES},
    "everything": merged(example("strimzi"), EVERYTHING),
    "alone": merged(example("npu"), {"worker": {"standby": False}, "settings": {"worker": {"drain_s": 40.5}}}),
    "a scenario of its own": {
        "settings": {
            "bootstrap": "kafka:9092",
            "scenario": "ads",
            "scenarios": {"home": {"share": 2}, "ads": {"topic_prefix": "shop-ads", "budget_ms": 30}},
        },
        "model": {"volume": {"hostPath": {"path": "/models/ads"}}},
    },
    "divert, traces, an own CA": {
        "settings": {
            "bootstrap": "kafka-1:9094,kafka-2:9095",
            "security": {
                "protocol": "SSL",
                "ca_file": "/etc/relaygr/ca/ca.crt",
                "certificate_file": "/etc/relaygr/security/tls.crt",
                "key_file": "/etc/relaygr/security/tls.key",
            },
            "worker": {"divert": True, "divert_bytes": "1MiB", "drain_s": 0},
            "trigger": {"remembered_users": 1_000_000},
            "tracing": {"enabled": True},
        },
        "security": {"secret": "client", "caSecret": "own-ca"},
        "networkPolicy": {"enabled": True, "egress": [{"ports": [{"protocol": "TCP", "port": 4318}]}]},
        "model": {"random": ["--layers", "1"]},
    },
    "one worker, shares of a GPU, no standby": {
        "settings": {
            "bootstrap": "kafka:9092",
            "affinity": "consumer_protocol",
            "worker": {"device": "cuda", "hbm_bytes": 20_000_000_000, "dram_bytes": "1.5TiB", "kv_dtype": "float8"},
        },
        "worker": {
            "replicas": 1,
            "standby": False,
            "leaveOnStop": False,
            "accelerator": {"resource": "nvidia.com/mig-3g.40gb", "count": 2},
            "runtimeClassName": "nvidia",
            "history": {"persistent": False, "size": "40Gi"},
        },
        "lag": {"enabled": False},
        "topics": {"job": False},
        "model": {"volume": {"csi": {"driver": "models.example.com"}}},
    },
    "a model from a bucket": {
        "settings": {"bootstrap": "kafka:9092", "worker": {"calibration": "/model/current/calibration.json"}},
        "model": {"source": "s3://models/ranker", "size": "8Gi", "storageClass": "fast"},
        "networkPolicy": {"enabled": True, "egress": [{"ports": [{"protocol": "TCP", "port": 443}]}]},
        "extraEnv": [{"name": "AWS_ENDPOINT_URL", "value": "https://store.example.com"}],
    },
    "a pool": merged(
        example("try"),
        {
            "settings": {
                "worker": {"pool": {"prefix": "shop", "visits": 3}},
                "scenarios": {"home": {"pre_infer": "pool"}, "ads": {"topic_prefix": "shop-ads"}},
            },
            "preInfer": {
                "replicas": 3,
                "settings": {"device": "cuda", "hbm_bytes": "8GiB", "history_max_bytes": 20_000_000_000},
                "accelerator": {"resource": "nvidia.com/mig-3g.40gb"},
                "memory": {"beside": "4GiB"},
            },
            "networkPolicy": {"enabled": True},
            "pool": {
                "enabled": True,
                "secret": "pool-key",
                "protocol": "rdma",
                "holder": {"replicas": 3, "bytes": "3.5GB", "nodeSelector": {"memory": "much"}},
                "master": {"tolerations": [{"key": "a", "operator": "Exists"}]},
            },
        },
    ),
    "sizes in bytes": merged(example("cuda"), {"settings": {"worker": {"dram_bytes": 8_589_934_592}}}),
}


@pytest.fixture(scope="module")
def helm() -> Iterator[Helm]:
    running = Helm()
    yield running
    running.close()


@pytest.fixture(params=CASES)
def chart(request: pytest.FixtureRequest, helm: Helm) -> Rendered:
    """The chart with the values of one case after the other."""
    rendered = helm.render(CASES[request.param])
    assert not rendered.error
    return rendered


def settings_file(chart: Rendered, folder: Path) -> Path:
    [config] = [each for each in chart.of("ConfigMap") if "helm.sh/hook" not in each["metadata"].get("annotations", {})]
    file = folder / "relaygr.yaml"
    file.write_text(config["data"]["relaygr.yaml"], encoding="utf-8")
    return file


def pods(chart: Rendered) -> dict[str, Any]:
    """Role -> the pod's specification."""
    found = [each["spec"]["template"] for kind in ("StatefulSet", "Deployment", "Job") for each in chart.of(kind)]
    return {each["metadata"]["labels"]["app.kubernetes.io/component"]: each["spec"] for each in found}


def container(chart: Rendered, role: str) -> Any:
    [found] = pods(chart)[role]["containers"]
    return found


def environment(chart: Rendered, role: str) -> dict[str, str]:
    """What the process of a role sees, with the pod `NAME-7`."""
    given = {each["name"]: each.get("value", "shop-relaygr-worker-7") for each in container(chart, role)["env"]}
    return {**image_environment(), **given}


def workers_of(chart: Rendered) -> list[str]:
    """The roles of workers that these values have."""
    return [role for role in WORKERS if role in pods(chart)]


def worker_command(chart: Rendered, ordinal: int, folder: Path, role: str = "worker") -> list[str]:
    """The arguments that the image's entry point gets, from the shell that the container runs."""
    stand_in = folder / "relaygr-entrypoint"
    stand_in.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n", encoding="utf-8")
    stand_in.chmod(0o755)
    own = container(chart, role)
    variables = {"PATH": f"{folder}:/usr/bin:/bin", "POD_NAME": f"shop-relaygr-{role}-{ordinal}"}
    done = subprocess.run([*own["command"], *own["args"]], env=variables, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def worker_settings(chart: Rendered, folder: Path, role: str = "worker") -> Settings:
    words = worker_command(chart, 7, folder, role)
    overrides = [words[index + 1] for index, word in enumerate(words) if word == "--set"]
    return load(settings_file(chart, folder), environment(chart, role), overrides).settings


def claims_of(chart: Rendered, name: str, role: str = "worker") -> list[Any]:
    """The claims of each worker with a name."""
    claims = chart.named("StatefulSet", f"-{role}")["spec"].get("volumeClaimTemplates", [])
    return [each for each in claims if each["metadata"]["name"] == name]


def mebibytes(text: str) -> int:
    return int(TypeAdapter(ByteSize).validate_python(f"{text}B")) // 2**20


# Rendering


def test_lint_has_nothing_to_say(chart: Rendered) -> None:
    assert chart.lint is not None
    assert (chart.lint["errors"], {each["error"] for each in chart.lint["messages"]}) == ([], {"icon is recommended"})


@pytest.mark.slow
@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_kubernetes_would_accept_every_object(chart: Rendered, version: str) -> None:
    """Strictly: an unknown field is a fault."""
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    builtin = [each for each in chart.objects if not each["apiVersion"].startswith(CUSTOM)]
    assert {"StatefulSet", "Deployment", "Service", "ConfigMap", "PodDisruptionBudget"} <= {x["kind"] for x in builtin}
    for each in builtin:
        kubernetes_validate.validate(each, version, strict=True)


def test_names_are_each_objects_own_and_short_enough(chart: Rendered) -> None:
    names = [(each["kind"], each["metadata"]["name"]) for each in chart.objects]
    assert len(set(names)) == len(names)
    assert [name for _, name in names if not re.fullmatch(r"[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?", name)] == []


def test_the_chart_has_the_version_of_the_package() -> None:
    described = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    assert (described["version"], described["appVersion"]) == (__version__, __version__)


@pytest.mark.slow
def test_the_packaged_chart_has_the_name_that_a_release_pushes_and_every_file(tmp_path: Path) -> None:
    script = "import sys, helm_python; print(helm_python.package(sys.argv[1], destination=sys.argv[2]))"
    command = [sys.executable, "-c", script, str(CHART), str(tmp_path)]
    subprocess.run(command, capture_output=True, timeout=120, check=True)
    with tarfile.open(tmp_path / f"relaygr-{__version__}.tgz") as archive:
        packed = {member.name for member in archive if member.isfile()}
    assert packed == {f"relaygr/{path.relative_to(CHART)}" for path in CHART.rglob("*") if path.is_file()}


def test_the_charts_catalogue_is_the_projects() -> None:
    committed = (CHART / "files" / "catalogue.yaml").read_text(encoding="utf-8")
    assert committed == catalogue(), (
        "run: python -m relaygr.chart_catalogue > compose/helm/relaygr/files/catalogue.yaml"
    )


SCRAM = {"security": {"protocol": "SASL_PLAINTEXT", "sasl_mechanism": "SCRAM-SHA-512"}}
WITH_TOPICS = {"strimzi": {"topics": True, "cluster": "c"}}
ADS = {"topic_prefix": "shop-ads", "model": "/model", "variants": {"c": {"users": 0.5, "model": "/model-c"}}}
LANES: dict[str, dict[str, Any]] = {
    "a history prefix": {"history_prefix": "shop"},
    "a scenario": {"scenario": "ads", "topic_prefix": "shop", "scenarios": {"ads": ADS}},
    "a variant": {"scenario": "ads/c", "topic_prefix": "shop", "scenarios": {"ads": ADS}},
    "a scenario for the pool": {"scenario": "ads", "scenarios": {"ads": {**ADS, "pre_infer": "pool"}}},
    "a variant for the pool": {"scenario": "ads/c", "scenarios": {"ads": {**ADS, "pre_infer": "pool"}}},
    "a scenario without a prefix": {"scenario": "feed", "group_prefix": "shop", "scenarios": {"feed": {"share": 2}}},
}
POOL = {"enabled": True, "secret": "s"}
FOR_POOL = {"scenarios": {"ads": {"topic_prefix": "shop-ads", "pre_infer": "pool"}, "home": {"pre_infer": "owner"}}}
OK = {"settings": {"bootstrap": "kafka:9092"}, "model": {"random": ["--layers", "1"]}}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"settings": {"bootstrap": ""}}, "settings.bootstrap"),
        ({"model": {"random": []}}, "model.volume"),
        ({"model": {"source": "hf://team/ranker"}}, "model.source and model.random are set"),
        (
            {"model": {"random": [], "source": "hf://team/ranker"}, "networkPolicy": {"enabled": True}},
            "networkPolicy.egress",
        ),
        ({"wroker": {}}, "wroker"),
        ({"worker": {"replicas": 49}}, "49 workers"),
        ({"worker": {"replicas": "two"}}, "replicas"),
        # Kubernetes refuses these, but only after the hook has run, and in words of its own.
        ({"worker": {"podAnnotations": {"prometheus.io/port": 8080}}}, "/worker/podAnnotations/prometheus.io~1port"),
        ({"trigger": {"podAnnotations": {"sidecar.istio.io/inject": False}}}, "/trigger/podAnnotations"),
        ({"worker": {"nodeSelector": {"gpu": True}}}, "/worker/nodeSelector/gpu"),
        ({"worker": {"tolerations": ["gpu"]}}, "/worker/tolerations/0"),
        ({"gateway": {"tolerations": [{"key": "gpu", "value": True}]}}, "/gateway/tolerations/0/value"),
        ({"image": {"pullSecrets": ["registry"]}}, "/image/pullSecrets/0"),
        ({"extraEnv": [{"name": "OMP_NUM_THREADS", "value": 4}]}, "/extraEnv/0/value"),
        ({"worker": {"extraVolumeMounts": [{"name": "ca"}]}}, "mountPath"),
        ({"monitoring": {"labels": {"release": 1}}}, "/monitoring/labels/release"),
        ({"worker": {"maxUnavailable": "one"}}, "/worker/maxUnavailable"),
        ({"worker": {"memory": {"limit": "8GiB"}}}, "worker.memory.limit is"),
        ({"worker": {"history": {"size": "40GB"}}}, "worker.history.size is"),
        ({"worker": {"cpu": "2 cores"}}, "worker.cpu is"),
        ({"model": {"random": [], "source": "hf://team/ranker", "size": "20GiB"}}, "model.size is"),
        ({"preInfer": {"cpu": "many"}}, "preInfer.cpu is"),
        # A section whose values are all commented out is null.
        ({"worker": {"accelerator": None}}, "'/worker': missing property 'accelerator'"),
        ({"keda": {"trigger": None}}, "'/keda': missing property 'trigger'"),
        ({"worker": {"startSeconds": None}}, "startSeconds"),
        ({"settings": {"worker": {"device": "gpu"}}}, "device"),
        ({"settings": {"worker": {"dram_bytes": "many"}}}, "settings.worker.dram_bytes"),
        ({"settings": {"worker": {"worker_id": "worker-00"}}}, "settings.worker.worker_id"),
        ({"settings": {"lag": {"http_port": 1}}}, "settings.lag.http_port"),
        ({"settings": {"security": {"sasl_password": "x"}}}, "settings.security.sasl_password"),
        ({"settings": {"gateway": {"token": "0123456789abcdef"}}}, "settings.gateway.token would be readable"),
        ({"settings": {"ui": {"http_host": "::1"}}}, "settings.ui.http_host"),
        ({"gateway": {"enabled": True}}, "gateway.tokenSecret"),
        ({"ui": {"enabled": True}}, "ui.tokenSecret"),
        ({"pool": {"enabled": True}}, "pool.secret"),
        (
            {"settings": {"worker": {"pool": {"store": "mooncake://m:1"}}}, "pool": {"enabled": True, "secret": "s"}},
            "settings.worker.pool.store is set by the chart",
        ),
        (
            {"settings": {"worker": {"pool": {"address": "m:1"}}}, "pool": {"enabled": True, "secret": "s"}},
            "settings.worker.pool.address is set by the chart",
        ),
        (
            {"settings": {"worker": {"pool": {"protocol": "rdma"}}}, "pool": {"enabled": True, "secret": "s"}},
            "a protocol is the value pool.protocol",
        ),
        ({"pool": {"enabled": True, "secret": "s", "protocol": "udp"}}, "pool/protocol"),
        ({"pool": {"enabled": True, "secret": "s", "holder": {"bytes": "many"}}}, "pool.holder.bytes"),
        ({"preInfer": {"replicas": 1}}, "set pool.enabled to true, or settings.worker.pool.store"),
        ({"preInfer": {"replicas": 1}, "pool": POOL}, "settings.scenarios.NAME.pre_infer"),
        ({"preInfer": {"replicas": 1}, "pool": POOL, "settings": FOR_POOL}, "every scenario of this release"),
        ({"preInfer": {"settings": {"model": "/m"}}}, "model"),
        ({"preInfer": {"memory": {"limit": "9Gi"}}}, "beside"),
        (
            {
                "preInfer": {"replicas": 1, "settings": {"dram_bytes": "many"}},
                "settings": {
                    "scenario": "ads",
                    **FOR_POOL,
                    "worker": {"pool": {"store": "mooncake://m:1", "secret_file": "/s"}},
                },
            },
            "preInfer.settings.dram_bytes",
        ),
        ({"settings": {"affinity": "consumer_protocol"}}, "worker.standby"),
        (
            {"settings": {"affinity": "one_topic"}, "strimzi": {"topics": True, "cluster": "c"}},
            "strimzi.topics to false",
        ),
        ({"worker": {"terminationGracePeriodSeconds": 20}}, "terminationGracePeriodSeconds"),
        ({"keda": {"worker": {"enabled": True}}}, "keda.prometheus"),
        ({"settings": SCRAM, "strimzi": {"users": ["worker"]}}, "strimzi.topics"),
        ({"strimzi": {"users": ["worker"], "topics": True}}, "settings.security.protocol is PLAINTEXT"),
        (
            {"settings": SCRAM, "strimzi": {"users": ["worker"], "topics": True, "authentication": "tls"}},
            "settings.security.protocol is SASL_PLAINTEXT: set it to SSL",
        ),
        ({"settings": {"security": {"protocol": "SSL", "ca_file": "/etc/relaygr/ca/ca.crt"}}}, "security.caSecret"),
        (
            {
                "settings": {"security": {"key_file": "/etc/relaygr/security/tls.key"}},
                "security": {"roles": {"worker": {"secret": "w"}, "trigger": {"secret": "t"}, "lag": {"secret": "l"}}},
            },
            "security.roles.topics.secret",
        ),
        ({"settings": {"tracing": {"enabled": True}}, "networkPolicy": {"enabled": True}}, "networkPolicy.egress"),
        ({"settings": {"scenario": "ads"}, **WITH_TOPICS}, "settings.scenarios does not have"),
        ({"settings": {"scenario": "ads/b", "scenarios": {"ads": ADS}}, **WITH_TOPICS}, "no such variant"),
    ],
)
def test_values_that_cannot_work_are_refused_by_name(helm: Helm, changes: dict[str, Any], named: str) -> None:
    assert not helm.render(OK).error
    assert named in helm.render(merged(OK, changes)).error


# What our processes get


@pytest.mark.parametrize("role", ["trigger", "lag", "gateway", "ui", "topics"])
def test_a_process_starts_with_its_settings(chart: Rendered, role: str, tmp_path: Path) -> None:
    """An unknown key, or a value out of bounds, would stop the process at its start."""
    if role not in pods(chart):
        pytest.skip("these values have no such process")
    settings = load(settings_file(chart, tmp_path), environment(chart, role)).settings
    result = CliRunner().invoke(app, [*container(chart, role)["args"], "--help"])
    assert result.exit_code == 0, result.output
    if role != "topics":
        own = getattr(settings, role)
        assert (own.http_host, own.http_port) == (ANY_ADDRESS, 8080)


def test_gateway_and_live_page_serve_others_and_ask_for_the_token_of_a_secret(helm: Helm, tmp_path: Path) -> None:
    chart = helm.render(CASES["everything"])
    file = settings_file(chart, tmp_path)
    gateway = load(file, environment(chart, "gateway")).settings.gateway
    assert (gateway.listen_host, gateway.is_local, gateway.gateway_id) == (ANY_ADDRESS, False, "shop-relaygr-worker-7")
    service = chart.named("Service", "-gateway")["spec"]
    assert {port["name"]: port["port"] for port in service["ports"]} == {"http": 8080, "api": gateway.listen_port}
    assert not service["publishNotReadyAddresses"], "callers would be sent to a gateway that drains"
    assert pods(chart)["gateway"]["terminationGracePeriodSeconds"] > gateway.stop_delay_s + gateway.drain_s + 10
    for role in ("gateway", "ui"):
        [token] = [each for each in container(chart, role)["env"] if each["name"] == f"RELAYGR_{role.upper()}__TOKEN"]
        assert token["valueFrom"] == {"secretKeyRef": {"name": f"{role}-token", "key": "token"}}


def test_the_live_page_finds_and_may_read_the_metrics_of_each_process(helm: Helm, tmp_path: Path) -> None:
    off = {"pool": {"enabled": False}, "preInfer": {"replicas": 0}}
    changes = {"settings": {"ui": {"scrape": ["http://mine:1/metrics"]}}, **off}
    chart = helm.render(merged(CASES["everything"], changes))
    pages = load(settings_file(chart, tmp_path), environment(chart, "ui")).settings.ui.scrape
    named = {
        f"http://{chart.named('Service', f'-{role}')['metadata']['name']}:8080/metrics"
        for role in ("trigger", "gateway")
    }
    assert set(pages) == {"http://mine:1/metrics", *named}
    worker = chart.named("StatefulSet", "-worker")["spec"]
    url = worker_settings(chart, tmp_path).worker.metrics_url_at(8080)
    assert url == f"http://$(POD_NAME).{worker['serviceName']}:8080/metrics"
    policy = chart.named("NetworkPolicy", "")["spec"]
    [metrics, _] = policy["ingress"]
    labels = chart.named("Deployment", "-ui")["spec"]["template"]["metadata"]["labels"]
    assert {"podSelector": {"matchLabels": labels}} in metrics["from"]
    assert [rule["ports"] for rule in policy["egress"] if "podSelector" in rule.get("to", [{}])[0]] == [
        metrics["ports"]
    ]


def test_a_worker_starts_with_its_ordinal_as_its_id(chart: Rendered, tmp_path: Path) -> None:
    for role in workers_of(chart):
        settings = worker_settings(chart, tmp_path, role)
        assert settings.worker.worker_id == f"{role}-007"
        assert (settings.worker.http_host, settings.worker.http_port) == (ANY_ADDRESS, 8080)
        words = worker_command(chart, 123, tmp_path, role)
        assert words[0] == "worker" and f"worker.worker_id={role}-123" in words
        assert CliRunner().invoke(app, [*words, "--help"]).exit_code == 0


def test_a_worker_writes_only_where_a_volume_is_mounted(chart: Rendered, tmp_path: Path) -> None:
    for role in workers_of(chart):
        own, mounts = container(chart, role), {x["mountPath"]: x for x in container(chart, role)["volumeMounts"]}
        settings = worker_settings(chart, tmp_path, role)
        assert own["securityContext"]["readOnlyRootFilesystem"] is True
        assert settings.worker.history_path.is_relative_to("/history") and "readOnly" not in mounts["/history"]
        assert settings.worker.shared_path == Path("/shared") and "readOnly" not in mounts["/shared"]
        assert {str(settings.worker.model), str(settings.worker.model.parent)} & set(mounts)
        assert "/tmp" in mounts and environment(chart, role)["HOME"] == "/tmp"


def test_the_cluster_may_choose_user_and_group(helm: Helm) -> None:
    """A security context constraint of OpenShift refuses pods that name a user outside of the namespace's range."""
    named = {"runAsUser", "runAsGroup", "fsGroup"}
    for user in (10001, 1_000_910_000, None):
        chart = helm.render(merged(CASES["everything"], {} if user == 10001 else {"user": user}))
        for each in pods(chart).values():
            given = each["securityContext"]
            assert given["runAsNonRoot"] is True
            assert {name: given[name] for name in named & set(given)} == (dict.fromkeys(named, user) if user else {})
    assert "user" in helm.render(merged(OK, {"user": 0})).error


def test_files_of_credentials_lie_in_mounted_secrets(chart: Rendered, tmp_path: Path) -> None:
    settings = load(settings_file(chart, tmp_path), environment(chart, "worker")).settings
    mounts = {each["mountPath"] for each in container(chart, "worker")["volumeMounts"]}
    files = [settings.security.ca_file, settings.security.sasl_password_file]
    assert [str(file) for file in files if file is not None and str(file.parent) not in mounts] == []


@pytest.mark.parametrize("role", PROCESSES)
def test_a_user_of_its_own_logs_in_for_each_role(helm: Helm, role: str) -> None:
    chart = helm.render(CASES["everything"])
    user = f"shop-relaygr-{role}"
    assert environment(chart, role)["RELAYGR_SECURITY__SASL_USERNAME"] == user
    [secret] = [each["secret"] for each in pods(chart)[role]["volumes"] if each["name"] == "security"]
    assert secret["secretName"] == user == chart.named("KafkaUser", f"-{role}")["metadata"]["name"]


def test_no_service_adds_a_variable_to_a_container(chart: Rendered) -> None:
    assert [name for name, pod in pods(chart).items() if pod["enableServiceLinks"] is not False] == []
    # Headless ones add none to other pods of the namespace either, such as a gateway's.
    assert [each for each in chart.of("Service") if each["spec"]["clusterIP"] != "None"] == []


# Workers


def test_a_workers_container_holds_what_the_worker_states(chart: Rendered, tmp_path: Path) -> None:
    for role in workers_of(chart):
        worker = worker_settings(chart, tmp_path, role).worker
        own = container(chart, role)
        each_bytes = queues_bytes(worker) + LIBRARIES_BYTES + (worker.hbm_bytes if worker.device == "cpu" else 0)
        processes = 2 if "--standby" in own["args"] else 1
        limit, request = own["resources"]["limits"]["memory"], own["resources"]["requests"]["memory"]
        assert limit == request
        # Its index takes a tenth, and the worker leaves a tenth of the free memory.
        most = worker.dram_bytes * 1.2 + worker.history_max_bytes + processes * each_bytes
        assert mebibytes(limit) * 2**20 >= most
        [shared] = [each["emptyDir"] for each in pods(chart)[role]["volumes"] if each["name"] == "shared"]
        assert shared["medium"] == "Memory"
        assert mebibytes(limit) > mebibytes(shared["sizeLimit"]) >= worker.dram_bytes * 1.1 / 2**20


def test_a_history_volume_has_room_for_a_copy(chart: Rendered, tmp_path: Path) -> None:
    for role in workers_of(chart):
        most = worker_settings(chart, tmp_path, role).worker.history_max_bytes
        folders = [each["emptyDir"] for each in pods(chart)[role]["volumes"] if each["name"] == "history"]
        claimed = [each["spec"]["resources"]["requests"]["storage"] for each in claims_of(chart, "history", role)]
        [size] = claimed + [each["sizeLimit"] for each in folders]
        assert mebibytes(size) * 2**20 >= 2 * most


def test_a_workers_own_volume_gets_the_model_of_the_source_before_the_worker_starts(helm: Helm, tmp_path: Path) -> None:
    """By the container's own words, with folders of this machine in the place of the bucket and the volume."""
    chart = helm.render(CASES["a model from a bucket"])
    [init] = pods(chart)["worker"]["initContainers"]
    assert {"name": "AWS_ENDPOINT_URL", "value": "https://store.example.com"} in init["env"]
    [claim] = claims_of(chart, "model")
    assert claim["spec"]["storageClassName"] == "fast"
    assert claim["spec"]["resources"]["requests"]["storage"] == "8Gi"

    store, volume = tmp_path / "store", tmp_path / "volume"
    here = {"s3://models/ranker": store.as_uri(), "/model": str(volume)}
    words = [here.get(word, word) for word in init["args"]]
    assert CliRunner().invoke(app, ["model", "init", str(store), "--layers", "1"]).exit_code == 0
    assert "has no calibration.json" in CliRunner().invoke(app, words).stderr, "the workers' settings name it"
    assert CliRunner().invoke(app, [*words, "--calibrate-at-start"]).exit_code == 0
    assert (volume / "current").is_dir() and worker_settings(chart, tmp_path).worker.model == Path("/model/current")

    store.rename(tmp_path / "elsewhere")
    assert CliRunner().invoke(app, words).exit_code == 0, "the copy serves while the source cannot be read"


def test_a_worker_is_given_time_to_drain(chart: Rendered, tmp_path: Path) -> None:
    # As long as the supervisor waits for its two processes, and then for the broker.
    for role in workers_of(chart):
        needed_s = worker_settings(chart, tmp_path, role).worker.drain_s + 10 + STANDBY_STOP_S + 5
        assert pods(chart)[role]["terminationGracePeriodSeconds"] > needed_s


def test_lock_and_standby_are_in_one_container(helm: Helm) -> None:
    for name in EXAMPLES:
        assert "--standby" in container(helm.render(CASES[name]), "worker")["args"]


@pytest.mark.parametrize(
    ("case", "resource"),
    [("cuda", "nvidia.com/gpu"), ("npu", "huawei.com/Ascend910"), ("everything", "huawei.com/Ascend310P")],
)
def test_a_worker_asks_for_its_device(helm: Helm, case: str, resource: str) -> None:
    assert container(helm.render(CASES[case]), "worker")["resources"]["limits"][resource] == 1


def test_a_disruption_takes_one_worker_at_a_time(chart: Rendered) -> None:
    for role in workers_of(chart):
        budget = chart.named("PodDisruptionBudget", f"-{role}")["spec"]
        assert budget["maxUnavailable"] == 1
        labels = chart.named("StatefulSet", f"-{role}")["spec"]["template"]["metadata"]["labels"]
        assert budget["selector"]["matchLabels"].items() <= labels.items()


@pytest.mark.parametrize("allowed", [0, "25%"])
def test_a_budget_is_as_given_and_keeps_no_node_for_a_pod_that_is_not_ready(helm: Helm, allowed: int | str) -> None:
    changes = {role: {"maxUnavailable": allowed} for role in ("worker", "trigger", "gateway")}
    budgets = helm.render(merged(CASES["everything"], changes)).of("PodDisruptionBudget")
    given = {each["metadata"]["name"].removeprefix(f"{RELEASE}-"): each["spec"] for each in budgets}
    assert {name: spec["maxUnavailable"] for name, spec in given.items()} == dict.fromkeys(
        ("worker", "pre-infer", "trigger", "gateway"), allowed
    )
    assert {spec["unhealthyPodEvictionPolicy"] for spec in given.values()} == {"AlwaysAllow"}


def test_every_container_asks_for_cores_and_memory_as_a_quota_demands(chart: Rendered) -> None:
    for spec in pods(chart).values():
        for each in [*spec.get("initContainers", []), *spec["containers"]]:
            assert set(each["resources"]["requests"]) >= {"cpu", "memory"}, each["name"]
            assert "memory" in each["resources"]["limits"], each["name"]


def test_the_first_install_may_wait_for_a_node_and_the_image(helm: Helm) -> None:
    """The deadline of a Job counts from its creation, and an image for GPUs has gigabytes."""
    [job] = helm.render(OK).of("Job")
    assert job["spec"]["activeDeadlineSeconds"] >= 1800


@pytest.mark.parametrize(
    ("changes", "restarted"),
    [
        ({"trigger": {"lead_fraction": 0.5}}, ["trigger"]),
        ({"worker": {"max_batch_requests": 16}}, ["worker", "pre-infer"]),
        ({"gateway": {"max_requests": 9}, "traffic": {"users": 5}}, ["gateway"]),
        ({"log": {"level": "debug"}}, list(PROCESSES)),
    ],
)
def test_a_changed_setting_restarts_the_roles_that_read_it(
    helm: Helm, changes: dict[str, Any], restarted: list[str]
) -> None:
    base = merged(OK, {key: EVERYTHING[key] for key in ("settings", "preInfer", "pool", "gateway", "ui")})
    before, after = helm.render(base), helm.render(merged(base, {"settings": changes}))
    kinds = dict.fromkeys(PROCESSES, "Deployment") | dict.fromkeys(WORKERS, "StatefulSet")
    changed = [
        role
        for role, kind in kinds.items()
        if before.named(kind, f"-{role}")["spec"]["template"] != after.named(kind, f"-{role}")["spec"]["template"]
    ]
    assert changed == restarted


def test_the_probes_ask_the_port_of_the_process(chart: Rendered) -> None:
    assert {"worker", "trigger"} <= set(pods(chart))
    for role in set(PROCESSES) & set(pods(chart)):
        own = container(chart, role)
        assert own["ports"][0] == {"name": "http", "containerPort": 8080}
        assert own["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "http"}
        assert "/healthz" in str(own["livenessProbe"])


# The pool


@pytest.mark.parametrize("role", WORKERS)
def test_workers_find_the_master_and_the_secret_of_the_pool(helm: Helm, role: str, tmp_path: Path) -> None:
    chart = helm.render(CASES["a pool"])
    pool = worker_settings(chart, tmp_path, role).worker.pool
    service = chart.named("Service", "-pool-master")
    assert pool.url is not None
    assert pool.url.address == f"{service['metadata']['name']}:{service['spec']['ports'][0]['port']}"
    assert pool.secret_file is not None
    [mount] = [x for x in container(chart, role)["volumeMounts"] if x["mountPath"] == str(pool.secret_file.parent)]
    [volume] = [each for each in pods(chart)[role]["volumes"] if each["name"] == mount["name"]]
    assert (volume["secret"]["secretName"], pool.secret_file.name) == ("pool-key", "secret")
    others = set(pods(chart)) - set(WORKERS)
    assert [other for other in others if "POOL__" in str(container(chart, other))] == []


def test_a_pre_infer_worker_starts_by_its_own_words(helm: Helm, tmp_path: Path) -> None:
    """As far as the missing model: it refuses `--standby` and `--leave-on-stop`, which the others have, before that."""
    chart = helm.render(CASES["a pool"])
    here = {
        "/etc/relaygr/settings/relaygr.yaml": str(settings_file(chart, tmp_path)),
        "worker.model=/model": "worker.model=/none",
    }
    words = [here.get(word, word) for word in worker_command(chart, 7, tmp_path, "pre-infer")]
    result = CliRunner().invoke(app, words, env=environment(chart, "pre-infer"))
    assert "/none" in result.output
    refused = CliRunner().invoke(app, [*words, "--standby"], env=environment(chart, "pre-infer"))
    assert "leave --standby" in refused.output


def test_pre_infer_workers_differ_from_the_others_by_what_is_given(helm: Helm, tmp_path: Path) -> None:
    chart = helm.render(CASES["a pool"])
    assert chart.named("StatefulSet", "-pre-infer")["spec"]["replicas"] == 3
    given = {"worker_id", "metrics_url", "device", "hbm_bytes", "history_max_bytes"}
    own, other = (worker_settings(chart, tmp_path, role).worker for role in reversed(WORKERS))
    assert (own.device, own.hbm_bytes, own.history_max_bytes) == ("cuda", 2**33, 20_000_000_000)
    assert own.model_dump(exclude=given) == other.model_dump(exclude=given)
    assert container(chart, "pre-infer")["resources"]["limits"]["nvidia.com/mig-3g.40gb"] == 1
    assert uses_pool(load(settings_file(chart, tmp_path), {}).settings.served), "the trigger gives them jobs"


def test_a_holder_joins_the_master_and_has_memory_beside_its_part_of_the_store(helm: Helm, tmp_path: Path) -> None:
    chart = helm.render(CASES["a pool"])
    pool, holder = worker_settings(chart, tmp_path).worker.pool, container(chart, "pool-holder")
    flags = dict(each.removeprefix("--").partition("=")[::2] for each in holder["args"])
    assert (flags["master_server_address"], {"protocol": flags["protocol"]}) == (pool.url.address, pool.url.options)
    assert flags["port"] == str(holder["ports"][0]["containerPort"])
    size, limit = int(flags["global_segment_size"]), holder["resources"]["limits"]["memory"]
    assert 3_500_000_000 <= size <= mebibytes(limit) * 2**20 - LIBRARIES_BYTES
    assert chart.named("StatefulSet", "-pool-holder")["spec"]["replicas"] == 3
    assert pods(chart)["pool-holder"]["nodeSelector"] == {"memory": "much"}


@pytest.mark.parametrize("part", ["master", "holder"])
def test_mooncakes_programs_know_the_options_that_they_get(helm: Helm, part: str) -> None:
    needs_mooncake()
    own = container(helm.render(CASES["a pool"]), f"pool-{part}")
    assert unknown_options(*own["command"], own["args"]) == []


@pytest.mark.parametrize("others", [True, False])
def test_only_workers_and_the_pools_own_parts_reach_the_pool(helm: Helm, others: bool) -> None:
    """`others`: whether the other processes have a policy, too. It must not let more in, and lets workers out."""
    chart = helm.render(merged(CASES["a pool"], {"networkPolicy": {"enabled": others}}))
    found = [
        each["spec"]["template"]["metadata"]["labels"] for each in chart.of("StatefulSet") + chart.of("Deployment")
    ]
    labels = {own["app.kubernetes.io/component"]: own for own in found}
    labels["another"] = {**labels["worker"], "app.kubernetes.io/instance": "another"}
    parts, pool = {"pool-master", "pool-holder"}, chart.named("NetworkPolicy", "-pool")["spec"]
    [[peer]] = [rule["from"] for rule in pool["ingress"]]
    assert chosen(pool["podSelector"], labels) == parts
    assert chosen(peer["podSelector"], labels) == {*parts, *WORKERS}
    rest = [each["spec"] for each in chart.of("NetworkPolicy") if each["spec"] != pool]
    assert len(rest) == others
    for policy in rest:
        assert chosen(policy["podSelector"], labels) == set(labels) - parts - {"another"}
        peers = [peer["podSelector"] for rule in policy["egress"] for peer in rule.get("to", [])]
        assert parts in [chosen(peer, labels) for peer in peers]


def test_policies_let_questions_to_the_name_service_out_also_in_openshift(helm: Helm) -> None:
    """A policy sees the port of the pod behind the Service, and OpenShift's name service listens on 5353."""
    policies = helm.render(merged(CASES["a pool"], {"networkPolicy": {"enabled": True}})).of("NetworkPolicy")
    assert len(policies) == 2
    for policy in policies:
        open_to_all = [rule["ports"] for rule in policy["spec"]["egress"] if "to" not in rule]
        ports = {(each["protocol"], each["port"]) for rule in open_to_all for each in rule}
        assert {("UDP", 53), ("TCP", 53), ("UDP", 5353), ("TCP", 5353)} <= ports


def chosen(selector: Any, labels: dict[str, dict[str, str]]) -> set[str]:
    """The names of those labels that a selector of the chart matches."""
    [rule] = selector["matchExpressions"]
    return {
        name
        for name, own in labels.items()
        if selector["matchLabels"].items() <= own.items()
        and (own[rule["key"]] in rule["values"]) == (rule["operator"] == "In")
    }


# Custom resources


def test_prometheus_gets_the_alert_rules_of_compose(helm: Helm) -> None:
    rule = helm.render(CASES["everything"]).named("PrometheusRule", "")
    assert rule["spec"] == yaml.safe_load(ALERTS.read_text(encoding="utf-8"))


def test_alerts_link_to_the_runbooks_that_the_operator_serves(helm: Helm) -> None:
    served = "https://docs.example.com/alerts.html"
    chart = helm.render(merged(CASES["everything"], {"monitoring": {"runbooks": served}}))
    links = [
        rule["annotations"]["runbook_url"]
        for group in chart.named("PrometheusRule", "")["spec"]["groups"]
        for rule in group["rules"]
        if "alert" in rule
    ]
    assert f"{served}#relayrequestslost" in links
    assert all(link.startswith(f"{served}#") for link in links)


def test_prometheus_finds_every_process_under_the_job_that_alerts_name(helm: Helm) -> None:
    chart = helm.render(CASES["everything"])
    monitor = chart.named("ServiceMonitor", "")["spec"]
    [unwanted] = monitor["selector"]["matchExpressions"]
    assert unwanted["operator"] == "NotIn"
    chosen = [
        each
        for each in chart.of("Service")
        if monitor["selector"]["matchLabels"].items() <= each["metadata"]["labels"].items()
        and each["metadata"]["labels"][unwanted["key"]] not in unwanted["values"]
    ]
    assert {each["metadata"]["labels"][monitor["jobLabel"]] for each in chosen} == set(PROCESSES) - {"ui"}
    [jobs] = re.findall(r'up{job=~"(.*)"}', alert_expressions()["RelayProcessDown"])
    assert set(PROCESSES) - {"ui"} <= set(jobs.split("|"))
    [endpoint] = monitor["endpoints"]
    assert all(endpoint["port"] in [port["name"] for port in each["spec"]["ports"]] for each in chosen)
    assert {"targetLabel": "release", "replacement": RELEASE} in endpoint["relabelings"]


@pytest.mark.parametrize(
    "changes", [{}, {"replication_factor": 1}, {"min_insync_replicas": 3, "partitions": 12}, OVERRIDES]
)
def test_strimzi_makes_the_topics_of_the_catalogue(helm: Helm, changes: dict[str, Any], tmp_path: Path) -> None:
    chart = helm.render(merged(example("strimzi"), {"settings": changes}))
    kafka = load(settings_file(chart, tmp_path), environment(chart, "worker")).settings
    made = {each["spec"]["topicName"]: each["spec"] for each in chart.of("KafkaTopic")}
    assert set(made) == {kafka.topic(topic) for topic in CATALOGUE}
    for topic, spec in CATALOGUE.items():
        found = made[kafka.topic(topic)]
        assert found["config"] == kafka.topic_config(topic)
        assert (found["partitions"], found["replicas"]) == (
            spec.partition_count(kafka.partitions),
            kafka.replication_factor,
        )


@pytest.mark.parametrize(
    ("case", "user", "role"),
    [
        *(("strimzi", role.value, role) for role in (Role.WORKER, Role.TRIGGER, Role.LAG, Role.GATEWAY)),
        ("strimzi", "history-publisher", Role.HISTORY_PUBLISHER),
        ("everything", "pre-infer", Role.WORKER_PRE_INFER),
        ("everything", "trigger", Role.TRIGGER_POOL),
    ],
)
def test_strimzi_gives_a_user_the_least_rights_of_its_role(
    helm: Helm, case: str, user: str, role: Role, tmp_path: Path
) -> None:
    chart = helm.render(CASES[case])
    kafka = load(settings_file(chart, tmp_path), environment(chart, "worker")).settings
    acls = chart.named("KafkaUser", f"-{user}")["spec"]["authorization"]["acls"]
    given = {(each["resource"]["type"], each["resource"]["name"], tuple(each["operations"])) for each in acls}
    assert given == {(right.resource.value, right.name, right.operations) for right in rights_of(role, kafka)}


@pytest.mark.parametrize("name", LANES)
def test_strimzi_and_keda_name_topics_and_groups_as_the_processes_do(helm: Helm, name: str, tmp_path: Path) -> None:
    chart = helm.render(merged(CASES["everything"], {"settings": LANES[name], "preInfer": {"replicas": 0}}))
    kafka = load(settings_file(chart, tmp_path), environment(chart, "worker")).settings
    made = {each["spec"]["topicName"] for each in chart.of("KafkaTopic")}
    wanted = {kafka.topic(topic) for topic in CATALOGUE}
    # Shared histories are topics of another release, which has made them.
    assert made == {topic for topic in wanted if topic.startswith(f"{kafka.topic_prefix}.")}
    trigger_role = Role.TRIGGER_POOL if uses_pool(kafka.served) else Role.TRIGGER
    for user, role in (("worker", Role.WORKER), ("trigger", trigger_role)):
        acls = chart.named("KafkaUser", f"-{user}")["spec"]["authorization"]["acls"]
        given = {(each["resource"]["type"], each["resource"]["name"], tuple(each["operations"])) for each in acls}
        assert given == {(right.resource.value, right.name, right.operations) for right in rights_of(role, kafka)}
    [trigger] = chart.named("ScaledObject", "-trigger")["spec"]["triggers"]
    assert f'group="{kafka.trigger_group}"' in trigger["metadata"]["query"]


@pytest.mark.parametrize(("role", "kind"), [("worker", "StatefulSet"), ("trigger", "Deployment")])
def test_keda_scales_by_metrics_that_are_exported(helm: Helm, role: str, kind: str) -> None:
    chart = helm.render(CASES["everything"])
    spec = chart.named("ScaledObject", f"-{role}")["spec"]
    target = chart.named(kind, f"-{role}")
    assert spec["scaleTargetRef"]["name"] == target["metadata"]["name"]
    assert spec["scaleTargetRef"].get("kind", "Deployment") == kind
    assert "replicas" not in target["spec"], "an upgrade would undo what KEDA did"
    queries = [each["metadata"]["query"] for each in spec["triggers"]]
    assert all(metrics_in(query) for query in queries)
    assert set().union(*map(metrics_in, queries)) <= exported_metrics()
    assert all(isinstance(each["metadata"]["threshold"], str) for each in spec["triggers"])


@pytest.mark.parametrize("role", ["worker", "trigger"])
def test_keda_takes_no_replica_away_when_a_query_has_no_answer(helm: Helm, role: str) -> None:
    """An answer without a value counted as 0. `or vector(0)` is a true 0: no request was late."""
    spec = helm.render(CASES["everything"]).named("ScaledObject", f"-{role}")["spec"]
    assert [each["metadata"]["ignoreNullValues"] for each in spec["triggers"]] == ["false"] * len(spec["triggers"])
    assert spec["fallback"] == {
        "failureThreshold": 3,
        "replicas": spec["minReplicaCount"],
        "behavior": "currentReplicasIfHigher",
    }
    # KEDA's fallback for the type Value needs the version that the page names.
    assert {each["metricType"] for each in spec["triggers"]} == {"Value"}
    late = [each["metadata"]["query"] for each in spec["triggers"] if each.get("name") == "late-share"]
    assert all(query.rstrip().endswith("or vector(0)") for query in late)


def test_workers_are_not_scaled_by_lag(helm: Helm) -> None:
    assert "lag" not in str(helm.render(CASES["everything"]).named("ScaledObject", "-worker")["spec"]["triggers"])
