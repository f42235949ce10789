"""compose.yaml is whole: its settings are settings, its order of start holds, its limits fit what workers state."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from pydantic import ByteSize, TypeAdapter
from typer.testing import CliRunner

from relaygr.admission.scenarios import PreInferBy
from relaygr.cli.app import app
from relaygr.runtime.http_server import ANY_ADDRESS
from relaygr.schemas.messages import DEFAULT_SCENARIO
from relaygr.settings import load, setting_fields
from relaygr.worker.pool.stores import store_url
from relaygr.worker.pool.stores.mooncake import LIBRARIES
from relaygr.worker.process.allocation import queues_bytes
from relaygr.worker.settings import WorkerRole
from tests.worlds.compose import (
    COMPOSE,
    COMPOSE_FILE,
    DOCKERFILE,
    POOL_FILE,
    ROOT,
    compose_file,
    dot_env,
    environment_of,
    image_environment,
    our_services,
    services,
)
from tests.worlds.pool import needs_mooncake, unknown_options

OWNERS = ("worker-00", "worker-01", "worker-cuda", "worker-npu")
WORKERS = (*OWNERS, "pre-infer-00")
BESIDE_BYTES = 2**29
"""What the interpreter, torch and the model of compose.yaml take beside a worker's own statement, rounded up."""


def size_bytes(text: str) -> int:
    """Compose's `2g` and our `2GiB` alike."""
    return int(TypeAdapter(ByteSize).validate_python(re.sub(r"(?i)^(\d+)([kmg])$", r"\1\2iB", text)))


def test_no_line_of_dot_env_is_unused_and_none_is_missing() -> None:
    files = COMPOSE_FILE.read_text(encoding="utf-8") + POOL_FILE.read_text(encoding="utf-8")
    named = set(re.findall(r"\$\{(\w+)\}", files))
    assert named == set(dot_env()) - {"COMPOSE_PROJECT_NAME"}


@pytest.mark.parametrize("name", our_services())
def test_every_variable_of_a_service_is_a_setting_with_a_value_that_is_allowed(name: str) -> None:
    """An unknown variable, or a value out of bounds, would stop the process at its start."""
    load(None, {key: str(value) for key, value in environment_of(name).items()})


def test_the_image_sets_nothing_but_settings() -> None:
    assert image_environment()
    assert set(image_environment()) <= {field.variable for field in setting_fields().values()}


@pytest.mark.parametrize("section", ["worker", "trigger", "traffic", "gateway", "lag", "ui"])
def test_every_process_serves_its_probes_where_the_health_check_asks(section: str) -> None:
    settings = getattr(load(None, image_environment()).settings, section)
    assert (settings.http_host, settings.http_port) == (ANY_ADDRESS, 8080)
    assert "http://127.0.0.1:8080/healthz" in DOCKERFILE.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", [name for name, service in our_services().items() if name != "model"])
def test_every_command_is_a_command_of_relaygr(name: str) -> None:
    result = CliRunner().invoke(app, [*our_services()[name]["command"], "--help"])
    assert result.exit_code == 0, result.output


def test_the_model_is_made_by_options_that_there_are() -> None:
    script = our_services()["model"]["command"][0]
    listed = CliRunner().invoke(app, ["model", "init", "--help"], env={"COLUMNS": "200"}).output
    options = re.findall(r"--[a-z-]+", script)
    assert options
    assert [option for option in options if option not in listed] == []


def test_the_model_takes_what_the_traffic_sends() -> None:
    script = our_services()["model"]["command"][0]
    traffic = load(None, {key: str(value) for key, value in environment_of("traffic").items()}).settings.traffic
    sizes = {name: int(value) for name, value in re.findall(r"--([a-z-]+) (\d+)", script)}
    assert sizes["max-prefix"] >= traffic.history_max
    assert sizes["max-suffix"] >= traffic.suffix
    assert sizes["max-candidates"] >= traffic.candidates
    assert sizes["vocabulary"] >= traffic.items


def test_worker_ids_and_history_volumes_are_each_workers_own() -> None:
    ids = [environment_of(name)["RELAYGR_WORKER__WORKER_ID"] for name in WORKERS]
    volumes = [volume for name in WORKERS for volume in services()[name]["volumes"] if volume.endswith(":/history")]
    assert len(set(ids)) == len(set(volumes)) == len(WORKERS)


@pytest.mark.parametrize("name", WORKERS)
def test_a_workers_container_may_hold_what_the_worker_says_it_holds(name: str) -> None:
    worker = load(None, {key: str(value) for key, value in environment_of(name).items()}).settings.worker
    each = queues_bytes(worker) + BESIDE_BYTES
    if worker.device == "cpu":
        each += worker.hbm_bytes
    processes = 2 if "--standby" in services()[name]["command"] else 1
    on_host = worker.dram_bytes + worker.history_max_bytes + processes * each
    assert size_bytes(services()[name]["mem_limit"]) >= on_host


def test_a_worker_with_a_standby_has_room_for_the_tier_that_they_share() -> None:
    """A container's /dev/shm has 64 MiB unless it is told otherwise."""
    paired = [name for name in WORKERS if "--standby" in services()[name]["command"]]
    assert paired
    for name in paired:
        worker = load(None, {key: str(value) for key, value in environment_of(name).items()}).settings.worker
        assert size_bytes(services()[name]["shm_size"]) >= 1.1 * worker.dram_bytes


def test_workers_get_the_address_of_the_master_and_the_secret() -> None:
    pooled = compose_file(POOL_FILE)
    for name in ("worker-00", "worker-01", "worker-cuda", "pre-infer-00"):
        own = pooled["services"][name]
        values = {**environment_of(name), **own["environment"]}
        pool = load(None, {key: str(value) for key, value in values.items()}).settings.worker.pool
        assert pool.url is not None
        host, _, port = pool.url.address.partition(":")
        assert f"--rpc_port={port}" in pooled["services"][host]["command"]
        assert str(pool.secret_file) in [f"/run/secrets/{secret}" for secret in own["secrets"]]
    assert "worker-npu" not in pooled["services"], "its image has no apt-get"
    ignored = (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()
    assert f"compose/{pooled['secrets']['pool']['file']}" in ignored


def test_the_lines_of_the_page_send_jobs_to_the_pre_infer_worker(tmp_path: Path) -> None:
    """The first line gives the trigger the scenario of the traffic, and the second one starts the worker."""
    text = (ROOT / "docs" / "compose.md").read_text(encoding="utf-8")
    [echo, up] = re.findall(r"^(echo .*SCENARIOS.*)\n(USERS=\d+ docker compose .*)$", text, re.MULTILINE)[0]
    subprocess.run(["/bin/sh", "-c", echo], cwd=tmp_path, check=True)
    name, _, value = (tmp_path / "settings.env").read_text(encoding="utf-8").rstrip("\n").partition("=")
    values = {**environment_of("trigger"), name: value}
    settings = load(None, {key: str(value) for key, value in values.items()}).settings
    assert settings.served[DEFAULT_SCENARIO].pre_infer is PreInferBy.POOL
    own = services()["pre-infer-00"]
    assert f"--file pool.yaml --profile {own['profiles'][0]} " in up
    assert own["command"] == ["worker", "--role", WorkerRole.PRE_INFER]


def _store(service: dict[str, Any]) -> str:
    return service.get("environment", {}).get("RELAYGR_WORKER__POOL__STORE", "")


def test_a_holder_joins_the_master_and_has_memory_beside_its_part_of_the_store() -> None:
    pooled = compose_file(POOL_FILE)["services"]
    [text] = {_store(each) for each in pooled.values()} - {""}
    holder, url = pooled["pool-holder"], store_url(text)
    flags = dict(each.removeprefix("--").partition("=")[::2] for each in holder["command"])
    assert (flags["host"], flags["master_server_address"]) == ("pool-holder", url.address)
    assert url.options == {"protocol": flags["protocol"]}
    assert size_bytes(holder["mem_limit"]) >= size_bytes(flags["global_segment_size"]) + BESIDE_BYTES


def test_an_image_with_the_pool_has_the_extra_and_the_libraries_of_debian() -> None:
    text = DOCKERFILE.read_text(encoding="utf-8")
    [extras] = re.findall(r"^ARG EXTRAS=(.*)$", text, re.MULTILINE)
    for name, service in compose_file(POOL_FILE)["services"].items():
        assert service["build"]["args"]["EXTRAS"] == f"{extras},pool", name
    [install] = re.findall(r"apt-get install (.*) \\", text)
    assert {word for word in install.split() if not word.startswith("-")} == set(LIBRARIES.values())


@pytest.mark.parametrize("name", ["pool-master", "pool-holder"])
def test_mooncakes_programs_know_the_options_that_they_get(name: str) -> None:
    needs_mooncake()
    own = compose_file(POOL_FILE)["services"][name]
    assert unknown_options(*own["entrypoint"], own["command"]) == []


def test_the_gateway_asks_for_a_token_and_brings_none() -> None:
    """A token in a published file is no secret: without one of the machine's own, the gateway refuses to start."""
    values = {key: str(value) for key, value in environment_of("gateway").items()}
    gateway = load(None, values).settings.gateway
    assert (gateway.is_local, gateway.token) == (False, None)
    assert [port.rpartition(":")[2] for port in services()["gateway"]["ports"]] == [str(gateway.listen_port)]
    assert int(services()["gateway"]["stop_grace_period"].removesuffix("s")) >= 2 * gateway.drain_s


def test_the_live_page_brings_no_token_and_reads_the_trigger() -> None:
    page = load(None, {key: str(value) for key, value in environment_of("ui").items()}).settings.ui
    assert page.token is None
    assert [port.rpartition(":")[2] for port in services()["ui"]["ports"]] == [str(page.http_port)]
    assert page.scrape == ("http://trigger:8080/metrics",) and "trigger" in services()


def test_the_traffic_is_given_time_to_drain_and_to_close_its_client() -> None:
    settings = load(None, {key: str(value) for key, value in environment_of("traffic").items()}).settings
    stops_s = settings.traffic.drain_s + settings.client.close_timeout_s
    assert int(services()["traffic"]["stop_grace_period"].removesuffix("s")) >= stops_s + 2


@pytest.mark.parametrize("name", WORKERS)
def test_a_worker_is_given_time_to_drain(name: str) -> None:
    drain_s = load(None, {key: str(value) for key, value in environment_of(name).items()}).settings.worker.drain_s
    assert int(services()[name]["stop_grace_period"].removesuffix("s")) >= 2 * drain_s


def test_processes_wait_for_topics_and_traffic_waits_for_those_that_answer_it() -> None:
    done, healthy = "service_completed_successfully", "service_healthy"
    needs = {name: service.get("depends_on", {}) for name, service in services().items()}
    assert needs["topics"]["broker"]["condition"] == healthy
    for name in ("trigger", "lag", "ui", "gateway", *WORKERS):
        assert needs[name]["topics"]["condition"] == done
    for name in WORKERS:
        assert needs[name]["model"]["condition"] == done
    for name in ("trigger", *OWNERS):
        assert needs["traffic"][name]["condition"] == healthy


def test_what_is_waited_for_until_it_is_healthy_is_asked_whether_it_is_ready() -> None:
    for name in ("trigger", *WORKERS):
        assert "/readyz" in services()[name]["healthcheck"]["test"][-1]
    assert "healthcheck" in services()["broker"]


def test_every_one_of_ours_has_an_init_and_few_rights() -> None:
    for name, service in our_services().items():
        assert service["init"] is True, name
        assert service["cap_drop"] == ["ALL"], name
    assert re.search(r"^USER 10001$", DOCKERFILE.read_text(encoding="utf-8"), re.MULTILINE)


def test_images_are_pinned() -> None:
    images = {key: value for key, value in dot_env().items() if key.endswith("IMAGE")}
    assert images
    assert [image for image in images.values() if not re.search(r":[^:]*\d", image)] == []


def test_only_loopback_ports_are_published() -> None:
    published = [port for service in services().values() for port in service.get("ports", [])]
    assert published
    assert [port for port in published if not port.startswith("127.0.0.1:")] == []


def test_what_is_mounted_from_the_repository_is_there() -> None:
    mounted = [v.split(":")[0] for service in services().values() for v in service.get("volumes", [])]
    assert [path for path in mounted if path.startswith("./") and not (COMPOSE / path).exists()] == []
    volumes = {name for name in mounted if "/" not in name}
    assert volumes == set(compose_file()["volumes"])


def test_the_build_sees_what_the_dockerfile_copies() -> None:
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    allowed = {line.removeprefix("!") for line in ignored if line.startswith("!")}
    assert {"pyproject.toml", "README.md", "LICENSE", "compose/entrypoint.sh"} <= allowed
    assert {"schemas", "streams", "workers", "training", "cli", "benchmarks"} <= allowed
    assert all((ROOT / path).exists() for path in allowed)
