"""The local stack under a real Docker, as a user meets it: `make test-containers`.

The image is built once, from a copy of the checkout. The variables of `compose/.env` may be given in the environment:
those that `tests/compose/stand_ins/make.sh` prints, and `PIP_ARGS`. Tests run in the order of this file: most of
them disturb one stack under traffic. Each prints what it measured.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from relaygr.client import Ended, Reason, RelayClient
from relaygr.devbroker import docker as docker_module
from relaygr.devbroker import local_broker
from relaygr.kafka.settings import KafkaSettings
from relaygr.settings import load
from relaygr.ui.scrape import Reading
from tests.waiting import until
from tests.worlds.compose import ROOT
from tests.worlds.proxy import VARIABLES
from tests.worlds.stack import Stack, docker, fresh_checkout, needs_docker, say, stack

pytestmark = [pytest.mark.container, pytest.mark.timeout(3600)]

LONG_S = 900.0
"""For what takes half a minute on a quiet machine."""
AWAITED = {"broker": "healthy", "trigger": "healthy", "worker-00": "healthy", "worker-01": "healthy"}
"""The services that others wait for, when `docker compose up` has returned."""
BUDGET_MS = "5000"
"""Of the traffic: a test is not about whether a busy machine is in time."""
ANSWERS = 20
POOL_FILES = ("--file", "compose.yaml", "--file", "pool.yaml")


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy whose image has been built."""
    needs_docker()
    folder = fresh_checkout(tmp_path_factory.mktemp("checkout"))
    with stack("relaygr-test-build", folder) as built:
        began_s = time.monotonic()
        built.compose("build", "topics", timeout_s=2400)
        size = int(docker("image", "inspect", "relaygr:local", "--format", "{{.Size}}"))
        say(f"the image was built in {time.monotonic() - began_s:.0f} s, and has {size / 1e6:.0f} MB")
    return folder


@pytest.fixture(scope="module")
def running(checkout: Path) -> Iterator[Stack]:
    """The default profile, started by the first command of docs/compose.md, with traffic that has been answered."""
    with stack("relaygr-test", checkout, BUDGET_MS=BUDGET_MS, RATE_PER_S="4") as up:
        began_s = time.monotonic()
        up.compose("up", "--detach", timeout_s=LONG_S)
        healthy_s = time.monotonic() - began_s
        healthy(up, "traffic")
        until(lambda: ranked(up.reading("traffic")) > 0, "a first answer", LONG_S)
        say(f"all healthy after {healthy_s:.0f} s, the first answer after {time.monotonic() - began_s:.0f} s")
        yield up


def ranked(gateway: Reading) -> float:
    return gateway.total("relaygr_gateway_requests_total", status="ranked")


def open_requests(gateway: Reading) -> float:
    """Those whose deadline has passed, and that neither a worker has answered nor Kafka refused."""
    timed_out = gateway.total("relaygr_gateway_requests_total", status="timed_out")
    unsent = gateway.total("relaygr_gateway_lost_requests_total", acknowledged="no")
    return timed_out - unsent - gateway.total("relaygr_gateway_late_results_total")


@contextmanager
def nothing_lost(stack: Stack) -> Iterator[None]:
    """After the block the traffic is answered again, and what Kafka acknowledged has an answer."""
    before = stack.reading("traffic")
    began_s = time.monotonic()
    yield
    after = stack.reading("traffic")
    until(lambda: ranked(stack.reading("traffic")) > ranked(after) + ANSWERS, "answers", LONG_S)
    until(lambda: open_requests(stack.reading("traffic")) == 0, "an answer to each request", 240)
    now = stack.reading("traffic")
    assert now.total("relaygr_gateway_lost_requests_total", acknowledged="yes") == 0
    ended = now.by_label("relaygr_gateway_requests_total", "status")
    earlier = before.by_label("relaygr_gateway_requests_total", "status")
    kinds = {status: round(count - earlier.get(status, 0)) for status, count in ended.items()}
    shown = ", ".join(f"{count} {status}" for status, count in kinds.items() if count)
    say(f"{time.monotonic() - began_s:.0f} s until all is as before; requests: {shown}")
    for worker in ("worker-00", "worker-01"):
        unranked = stack.reading(worker).by_label("relaygr_worker_unranked_total", "outcome")
        shown = ", ".join(f"{count:.0f} {outcome}" for outcome, count in unranked.items() if count)
        say(f"{worker} since its start: {shown or 'all ranked'}")


def healthy(stack: Stack, *services: str) -> None:
    wanted = dict.fromkeys(services, "healthy")
    until(lambda: wanted.items() <= stack.states().items(), f"{services} healthy", LONG_S)


def memory(stack: Stack) -> str:
    """Of each container, in words."""
    listed = docker("stats", "--no-stream", "--format", "{{.Name}} {{.MemUsage}}").splitlines()
    return ", ".join(line.removeprefix(f"{stack.project}-") for line in listed if line.startswith(f"{stack.project}-"))


def test_the_first_command_starts_all_and_traffic_is_answered(running: Stack) -> None:
    states = running.states()
    assert AWAITED.items() <= states.items()
    assert {states["topics"], states["model"]} == {"exited 0"}
    assert set(states) - set(AWAITED) - {"topics", "model"} == {"traffic", "lag", "ui"}
    healthy(running, "traffic", "lag", "ui")
    say(memory(running))


def test_the_page_is_where_its_log_says_and_shows_what_workers_measure(running: Stack) -> None:
    said = running.logs("ui")
    [address] = re.findall(r"http://127\.0\.0\.1:\d+/(?=\n)", said)
    [token] = re.findall(r"^token (\S+)$", said, re.MULTILINE)
    assert address == f"http://127.0.0.1:{running.port('UI')}/"
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(f"{address}state", timeout=30)
    asked = urllib.request.Request(f"{address}state", headers={"authorization": f"Bearer {token}"})

    def workers() -> dict[str, dict[str, object]]:
        with urllib.request.urlopen(asked, timeout=30) as answer:
            shown: list[dict[str, object]] = json.load(answer)["live"]["workers"]
        return {str(each["worker_id"]): each for each in shown}

    def cached(worker: dict[str, object]) -> object:
        hbm = worker["hbm"]
        assert isinstance(hbm, dict)
        return hbm["cached_bytes"]

    until(lambda: set(workers()) == {"worker-00", "worker-01"}, "both workers", LONG_S)
    until(lambda: all(map(cached, workers().values())), "cached bytes, of the workers' own metrics", LONG_S)


def test_a_client_on_this_machine_is_ranked(running: Stack) -> None:
    settings = KafkaSettings(bootstrap=f"localhost:{running.port('KAFKA')}", partitions=48)
    with RelayClient(settings, "gateway-of-the-test") as client:
        answer = client.rank("a new user", list(range(8)), budget_ms=30_000)
    assert answer.status is Ended.RANKED
    assert answer.result is not None and answer.result.scores is not None
    assert len(answer.result.scores) == 8


def test_the_lines_that_observe_it_find_nothing_wrong(running: Stack) -> None:
    text = (ROOT / "docs" / "compose.md").read_text(encoding="utf-8")
    lines = re.findall(r"^docker compose exec (.*)$", text, re.MULTILINE)
    assert len(lines) == 2
    for line in lines:
        # It ends, and needs no terminal.
        running.typed(f"docker compose exec -T {line.replace('--watch', '--judge')}")


def test_prometheus_reads_every_process_and_no_alert_fires_in_calm(running: Stack) -> None:
    """Grafana is left to the machines that reach its image."""
    running.compose("--profile", "monitoring", "up", "--detach", "--no-deps", "prometheus")
    at = f"http://127.0.0.1:{running.port('PROMETHEUS')}/api/v1"

    def ask(path: str) -> dict[str, list[dict[str, object]]]:
        try:
            with urllib.request.urlopen(f"{at}/{path}", timeout=30) as answer:
                found: dict[str, list[dict[str, object]]] = json.load(answer)["data"]
        except OSError:
            return {}
        return found

    def up() -> set[tuple[str, str]]:
        targets = ask("targets").get("activeTargets", [])
        return {(str(each["scrapePool"]), str(each["health"])) for each in targets}

    wanted = {(job, "up") for job in ("worker", "trigger", "traffic", "lag")}
    until(lambda: up() == wanted, "all targets up", LONG_S)
    until(lambda: len(ask("query?query=relaygr_worker_ranked_total").get("result", [])) > 1, "workers' metrics", 120)

    def health() -> set[str]:
        groups = ask("rules").get("groups", [])
        return {rule["health"] for group in groups for rule in group["rules"]}  # type: ignore[attr-defined]

    until(lambda: health() == {"ok"}, "every rule was evaluated", LONG_S)
    time.sleep(30)
    alerts = {each["labels"]["alertname"]: each["state"] for each in ask("alerts")["alerts"]}  # type: ignore[index]
    say(f"alerts: {alerts or 'none'}")
    assert "firing" not in alerts.values()


def test_a_killed_worker_loses_nothing_and_comes_back(running: Stack) -> None:
    with nothing_lost(running):
        running.compose("kill", "worker-00")
        began_s, before = time.monotonic(), running.reading("worker-01")
        moved = "relaygr_worker_ranked_total"
        until(lambda: running.reading("worker-01").total(moved) > before.total(moved) + ANSWERS, "answers", LONG_S)
        assert running.states()["worker-00"] == "exited 137"
        say(f"the other worker ranked {ANSWERS} within {time.monotonic() - began_s:.0f} s")
        running.compose("up", "--detach", "worker-00", timeout_s=LONG_S)
        healthy(running, "worker-00")


def test_a_stopped_worker_ends_well_and_loses_nothing(running: Stack) -> None:
    with nothing_lost(running):
        began_s = time.monotonic()
        running.compose("stop", "worker-01")
        say(f"stopped after {time.monotonic() - began_s:.0f} s")
        assert running.states()["worker-01"] == "exited 0"
        running.compose("start", "worker-01", timeout_s=LONG_S)
        healthy(running, "worker-01")


def test_a_restarted_worker_loses_nothing(running: Stack) -> None:
    with nothing_lost(running):
        running.compose("restart", "worker-00", timeout_s=LONG_S)
        healthy(running, "worker-00")


def test_a_restarted_broker_loses_nothing(running: Stack) -> None:
    with nothing_lost(running):
        running.compose("restart", "broker", timeout_s=LONG_S)
        healthy(running, "broker", "trigger", "worker-00", "worker-01")


def test_a_new_image_takes_over_under_traffic(running: Stack, checkout: Path) -> None:
    with (checkout / "cli" / "relaygr" / "machine.py").open("a", encoding="utf-8") as file:
        file.write("# Another image.\n")
    before = running.containers()
    running.compose("build", "topics", timeout_s=2400)
    with nothing_lost(running):
        for worker in ("worker-00", "worker-01"):
            running.compose("up", "--detach", "--no-deps", worker, timeout_s=LONG_S)
            healthy(running, worker)
    after = running.containers()
    changed = {name for name in before if after[name]["Image"] != before[name]["Image"]}
    assert changed == {"worker-00", "worker-01"}
    assert after["traffic"]["Id"] == before["traffic"]["Id"]


def test_the_gateway_refuses_to_start_without_a_token_and_ranks_with_it(running: Stack) -> None:
    text = (ROOT / "docs" / "compose.md").read_text(encoding="utf-8")
    [line] = re.findall(r"^echo .*GATEWAY__TOKEN.*$", text, re.MULTILINE)
    up = ("--profile", "gateway", "up", "--detach", "--no-deps", "gateway")
    running.compose(*up)
    until(lambda: "gateway.token" in running.logs("gateway"), "a refusal that names the setting", LONG_S)
    running.typed(line)
    token = (running.folder / "settings.env").read_text(encoding="utf-8").partition("=")[2].strip()
    running.compose(*up)
    healthy(running, "gateway")

    def rank(headers: dict[str, str]) -> dict[str, object]:
        body = json.dumps({"user_id": "ann", "candidates": [101, 102, 103]}).encode()
        headers = {"content-type": "application/json", "x-relaygr-budget-ms": "30000", **headers}
        url = f"http://127.0.0.1:{running.port('GATEWAY')}/v1/rank"
        with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=60) as answer:
            found: dict[str, object] = json.load(answer)
        return found

    with pytest.raises(urllib.error.HTTPError, match="401"):
        rank({})
    assert rank({"authorization": f"Bearer {token}"})["status"] == "ranked"


def test_the_last_command_leaves_nothing(running: Stack) -> None:
    """Of any profile: Compose leaves the services of profiles that a command does not name."""
    text = (ROOT / "docs" / "compose.md").read_text(encoding="utf-8")
    [line] = re.findall(r"^(docker compose .*down --volumes.*?) *#", text, re.MULTILINE)
    assert {"prometheus", "gateway"} <= set(running.states())
    began_s = time.monotonic()
    running.compose("--profile", "*", "stop", "--timeout", "60")
    assert {name: state for name, state in running.states().items() if state != "exited 0"} in (
        {},
        {"broker": "exited 143"},
    )
    say(f"stopped after {time.monotonic() - began_s:.0f} s")
    say(running.logs("traffic").splitlines()[-1])
    assert running.left()
    running.typed(line)
    assert running.left() == []


def test_a_read_only_root_and_the_proxies_of_a_company_change_nothing(checkout: Path) -> None:
    """A proxy that leads nowhere: no process of ours, and no check of its health, asks it for another one of ours."""
    ours = ("topics", "model", "trigger", "worker-00", "traffic", "lag", "ui")
    proxies = dict.fromkeys(VARIABLES, "http://192.0.2.1:3128")
    override = {"services": {name: {"read_only": True, "tmpfs": ["/tmp"], "environment": proxies} for name in ours}}
    (checkout / "compose" / "compose.override.yaml").write_text(json.dumps(override), encoding="utf-8")
    with stack("relaygr-test-strict", checkout, BUDGET_MS=BUDGET_MS, RATE_PER_S="4") as strict:
        strict.compose("up", "--detach", "--scale", "worker-01=0", "--scale", "traffic=0", timeout_s=LONG_S)
        strict.compose("up", "--detach", "--no-deps", "traffic", timeout_s=LONG_S)
        healthy(strict, "worker-00", "trigger", "traffic", "lag", "ui")
        until(lambda: ranked(strict.reading("traffic")) > ANSWERS, "answers", LONG_S)
    (checkout / "compose" / "compose.override.yaml").unlink()


def test_a_worker_with_too_little_memory_says_so_and_one_with_what_it_asks_for_is_not_killed(checkout: Path) -> None:
    """The limit of the container is the sum that the worker states, for its two processes."""
    small = {"WORKER_HBM_BYTES": "16MiB", "WORKER_DRAM_BYTES": "64MiB", "WORKER_HISTORY_MAX_BYTES": "64MiB"}
    traffic = {"BUDGET_MS": BUDGET_MS, "RATE_PER_S": "6", "USERS": "200"}
    with stack("relaygr-test-limit", checkout, **small, **traffic, WORKER_MEMORY_LIMIT="400m") as tight:
        # Compose waits for no health of a service that is named.
        tight.compose("up", "--detach", "worker-00", timeout_s=LONG_S)
        until(lambda: "worker.dram_bytes" in tight.logs("worker-00"), "a refusal that names a setting", LONG_S)
        refusal = next(line for line in tight.logs("worker-00").splitlines() if "worker.dram_bytes" in line)
        say(refusal)
        tight.compose("down", "--volumes")
    with stack("relaygr-test-limit", checkout, **small, **traffic, WORKER_MEMORY_LIMIT="1536m") as fitting:
        fitting.compose("up", "--detach", "trigger", "worker-00", timeout_s=LONG_S)
        healthy(fitting, "trigger", "worker-00")
        fitting.compose("up", "--detach", "--no-deps", "traffic", timeout_s=LONG_S)
        healthy(fitting, "traffic")
        until(lambda: ranked(fitting.reading("traffic")) > 200, "answers", LONG_S)
        say(memory(fitting))
        [worker] = [found for name, found in fitting.containers().items() if name == "worker-00"]
        assert (worker["State"]["OOMKilled"], worker["RestartCount"]) == (False, 0)
        assert fitting.reading("worker-00").total("relaygr_supervisor_replaced_total") == 0


@pytest.fixture(scope="module")
def with_pool(checkout: Path) -> Path:
    """The copy with the secret of the pool and the image that has its client."""
    text = (ROOT / "docs" / "compose.md").read_text(encoding="utf-8")
    [secret] = re.findall(r"^openssl rand .*> pool-secret$", text, re.MULTILINE)
    with stack("relaygr-test-build", checkout) as built:
        built.typed(secret)
        built.compose(*POOL_FILES, "build", "worker-00", timeout_s=2400)
    return checkout


def of_owners(stack: Stack, name: str, outcome: str) -> float:
    """The total of both workers."""
    return sum(stack.reading(worker).total(name, outcome=outcome) for worker in ("worker-00", "worker-01"))


def test_the_pool_takes_prefixes(with_pool: Path) -> None:
    with stack("relaygr-test-pool", with_pool, BUDGET_MS=BUDGET_MS, RATE_PER_S="4", USERS="12") as pooled:
        pooled.compose(*POOL_FILES, "up", "--detach", timeout_s=LONG_S)
        stored = "relaygr_pool_objects_written_total"
        until(lambda: of_owners(pooled, stored, "stored") > 0, "prefixes in the pool", LONG_S)
        say(f"{of_owners(pooled, stored, 'stored'):.0f} objects; {memory(pooled)}")


def test_owners_rank_on_what_a_pre_infer_worker_computed(with_pool: Path) -> None:
    """The default deadline puts impressions at risk."""
    text = (ROOT / "docs" / "compose.md").read_text(encoding="utf-8")
    [scenario] = re.findall(r"^echo .*RELAYGR_SCENARIOS.*$", text, re.MULTILINE)
    [up] = re.findall(r"^USERS=.*--profile pre-infer up.*$", text, re.MULTILINE)
    with stack("relaygr-test-pre-infer", with_pool, RATE_PER_S="4") as pooled:
        pooled.typed(scenario)
        pooled.typed(f"{up.removesuffix('--build')} --detach", LONG_S)
        healthy(pooled, "pre-infer-00", "traffic")
        fetches = "relaygr_pool_fetches_total"
        until(lambda: of_owners(pooled, fetches, "loaded") > 0, "a prefix that an owner loaded", LONG_S)
        jobs = pooled.reading("pre-infer-00").by_label("relaygr_preinfer_pool_jobs_total", "event")
        say(f"jobs of the pre-infer worker: {jobs}, {of_owners(pooled, fetches, 'loaded'):.0f} prefixes were loaded")
        assert jobs["prepared"] > 0
    (with_pool / "compose" / "settings.env").unlink()


def test_the_broker_of_testcontainers_takes_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    needs_docker()
    monkeypatch.setattr(docker_module, "IMAGE", os.environ.get("KAFKA_IMAGE", docker_module.IMAGE))
    with local_broker("docker") as broker:
        settings = broker.settings(KafkaSettings(partitions=4, connect_timeout_s=60))
        broker.create_topics(settings)
        with RelayClient(settings, "gateway") as client:
            answer = client.rank("nobody", [1], budget_ms=2000)
        # No worker: that Kafka has the request is all that there is to see.
        assert (answer.status, answer.reason) == (Ended.TIMED_OUT, Reason.NO_ANSWER)


@pytest.mark.parametrize("service", ["worker-cuda", "worker-npu"])
def test_accelerators_are_asked_for_as_their_drivers_need_it(service: str) -> None:
    """No such device is in the lane: the configuration is all that is looked at."""
    needs_docker()
    done = subprocess.run(
        ["docker", "compose", "--profile", service.removeprefix("worker-"), "config", "--format", "json"],
        cwd=ROOT / "compose", capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    own = json.loads(done.stdout)["services"][service]
    environment = {name: str(value) for name, value in own["environment"].items() if name.startswith("RELAYGR_WORKER")}
    assert load(None, environment).settings.worker.device == service.removeprefix("worker-")
    if service == "worker-cuda":
        assert own["deploy"]["resources"]["reservations"]["devices"][0]["capabilities"] == ["gpu"]
    else:
        assert {"/dev/davinci0", "/dev/davinci_manager"} <= {str(each["source"]) for each in own["devices"]}
