"""docs/first-hour.md runs from top to bottom on a real Kafka, in a shell, on a small log in MovieLens' form."""

from __future__ import annotations

import json
import re
import shutil
import uuid
from pathlib import Path

import numpy as np
import pytest

from relaygr.devbroker import LocalBroker
from relaygr.devbroker.local import free_ports
from relaygr.ingest.reading import read_interactions
from relaygr.kafka.settings import KafkaSettings
from tests.worlds.page_script import type_in

PAGE = (Path(__file__).parents[2] / "docs" / "first-hour.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```(\w+) ?(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
CHANGES = {
    # Less waiting.
    "duration_s=20": "duration_s=7",
    "sleep 15": "sleep 7",
    # The messages of the last second may not be committed yet.
    "\nrelaygr lag\n": "\nrelaygr lag || test $? = 4\n",
}
PATIENT = {"5000": "9000", "tight_ms = full_ms // 2": "tight_ms = 9000"}
"""A busy machine delays a request by more than half of full inference."""
TIMEOUT_S = 400


def blocks(language: str) -> dict[str, str]:
    return {name or str(at): text for at, (found, name, text) in enumerate(BLOCK.findall(PAGE)) if found == language}


def write_log(path: Path) -> None:
    """`u.data`: user, item, rating and time, between tabs."""
    random = np.random.default_rng(1)
    with path.open("w", encoding="utf-8") as file:
        for user in (196, *range(1, 40)):
            for at in range(int(random.integers(60, 200))):
                item, rating = random.integers(1, 300), random.integers(1, 6)
                file.write(f"{user}\t{item}\t{rating}\t{880_000_000 + 3600 * at}\n")


def test_the_gateway_of_the_page_sends_the_codes_that_publish_sends(tmp_path: Path) -> None:
    """The first behaviour of the real log is three stars of user 196 for item 242."""
    log = tmp_path / "u.data"
    log.write_text("196\t242\t3\t881250949\n", encoding="utf-8")
    (behaviour,) = re.findall(r"RECENT = .*\[(\(.*\))\]", blocks("python")["gateway"])
    read = read_interactions(log).of(0)
    published = int(read.items[0]), int(read.actions[0]), int(read.timestamps_ms[0])
    assert behaviour == str(published)


def test_the_page_waits_until_each_process_of_its_settings_is_ready() -> None:
    before = "\n".join(blocks("bash").values()).partition("python gateway.py")[0]
    ports = re.findall(r"http_port: (\d+)", blocks("yaml")["relaygr"])
    assert len(ports) == 2
    assert [port for port in ports if not re.search(rf"^until .*localhost:{port}/readyz", before, re.MULTILINE)] == []


@pytest.mark.kafka
@pytest.mark.timeout(TIMEOUT_S + 60)
def test_the_page_can_be_typed_in(real_broker: LocalBroker, tmp_path: Path) -> None:
    prefix = f"test-{uuid.uuid4().hex[:12]}"
    kafka = real_broker.settings(KafkaSettings(topic_prefix=prefix, group_prefix=prefix, partitions=12))
    write_log(tmp_path / "u.data")
    (tmp_path / "relaygr.yaml").write_text(blocks("yaml")["relaygr"], encoding="utf-8")
    gateway = blocks("python")["gateway"]
    for written, patient in PATIENT.items():
        assert written in gateway
        gateway = gateway.replace(written, patient)
    (tmp_path / "gateway.py").write_text(gateway, encoding="utf-8")
    script = "\n".join(blocks("bash").values())
    shared = Path("/dev/shm") / prefix
    worker, trigger, page = map(str, free_ports(3))
    ports = {"9301": worker, "9302": trigger}
    hosts = {
        "localhost:9092": kafka.bootstrap,
        **{f"localhost:{port}": f"localhost:{own}" for port, own in ports.items()},
    }
    for written, meant in {**CHANGES, **hosts}.items():
        assert written in script
        script = script.replace(written, meant)
    environment = {
        "RELAYGR_TOPIC_PREFIX": prefix,
        "RELAYGR_GROUP_PREFIX": prefix,
        "RELAYGR_PARTITIONS": "12",
        "RELAYGR_REPLICATION_FACTOR": str(kafka.replication_factor),
        "RELAYGR_WORKER__HTTP_PORT": worker,
        "RELAYGR_TRIGGER__HTTP_PORT": trigger,
        # With that much time no request is at risk.
        "RELAYGR_TRIGGER__POLICY": "always",
        "RELAYGR_WORKER__SHARED_PATH": str(shared),
        "RELAYGR_UI__HTTP_PORT": page,
    }
    try:
        printed = type_in(script, tmp_path, environment, TIMEOUT_S)
    finally:
        real_broker.delete_topics(kafka)
        shutil.rmtree(shared, ignore_errors=True)
    paths = dict(re.findall(r"^(long-\d) \w+ (\w+) [\d.]+ ms of \d+ ms$", printed, re.MULTILINE))
    assert paths.pop("long-4") in ("hbm", "pending"), printed
    assert paths == dict.fromkeys(("long-1", "long-2", "long-3"), "full"), printed
    assert 'relaygr_trigger_decisions_total{reason="admitted"} 1.0' in printed
    assert "requests with a deadline of" in printed and "P99" in printed
    killed = json.loads((tmp_path / "killed.json").read_text())
    assert killed["requests"] > 50
    assert not any("lost" in ending for ending in killed["endings"])
