"""docs/deploying.md: three scenarios on one machine, in a shell, as the page says."""

from __future__ import annotations

import re
import shutil
import uuid
from pathlib import Path

import pytest

from relaygr.client.scenarios import kafka_of
from relaygr.devbroker import LocalBroker
from relaygr.devbroker.local import free_ports
from relaygr.kafka.settings import KafkaSettings
from relaygr.settings import load
from relaygr.traffic.records import LOST, read_records
from relaygr.worker.model.checkpoint import load_checkpoint
from tests.worlds.page_script import type_in

PAGE = (Path(__file__).parents[2] / "docs" / "deploying.md").read_text(encoding="utf-8")
TIMEOUT_S = 500


def block(language: str, name: str) -> str:
    [text] = re.findall(rf"^```{language} {name}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    return str(text)


@pytest.mark.kafka
@pytest.mark.timeout(TIMEOUT_S + 60)
def test_three_scenarios_can_be_tried_on_one_machine(real_broker: LocalBroker, tmp_path: Path) -> None:
    prefix = f"shop-{uuid.uuid4().hex[:8]}"
    kafka = real_broker.settings(KafkaSettings(topic_prefix=prefix, group_prefix=prefix, partitions=8))
    settings, script = block("yaml", "shop"), block("bash", "start") + block("bash", "play")
    ports = ("9301", "9302", "9303", "9304")
    for written, meant in {
        "localhost:9092": kafka.bootstrap,
        **dict(zip(ports, map(str, free_ports(len(ports))), strict=True)),
    }.items():
        assert written in script
        script = script.replace(written, meant)
    # A busy machine answers late, and a shorter run tells the same.
    settings = re.sub(r"budget_ms: \d+", "budget_ms: 9000", settings.replace("duration_s: 20", "duration_s: 8"))
    settings = re.sub(r"\bshop\b", prefix, settings)
    (tmp_path / "shop.yaml").write_text(settings, encoding="utf-8")
    shared = Path("/dev/shm") / prefix
    environment = {
        "RELAYGR_PARTITIONS": "8",
        "RELAYGR_REPLICATION_FACTOR": str(kafka.replication_factor),
        "RELAYGR_WORKER__SHARED_PATH": str(shared),
        # With that much time no request is at risk.
        "RELAYGR_TRIGGER__POLICY": "always",
    }
    try:
        printed = type_in(script, tmp_path, environment, TIMEOUT_S)
    finally:
        real_broker.delete_topics(kafka)
        real_broker.delete_topics(
            kafka_of(kafka, load(tmp_path / "shop.yaml", {"RELAYGR_SCENARIO": "ads"}).settings.deployment)
        )
        shutil.rmtree(shared, ignore_errors=True)
    revisions = {name: load_checkpoint(tmp_path / "models" / name).revision for name in ("home", "ads")}
    for name, served_by in (("home", "home"), ("search", "home"), ("ads", "ads")):
        read = list(read_records(tmp_path / f"{name}.jsonl"))
        assert len(read) > 5
        assert LOST not in {record.status for record in read}
        assert {record.model_revision for record in read if record.model_revision} == {revisions[served_by]}, name
        events = [
            float(count)
            for count in re.findall(rf'scenario_events_total{{admitted=".+",scenario="{name}"}} (.+)', printed)
        ]
        assert sum(events) > 0, printed
        assert f'scenario_ranking_seconds_count{{scenario="{name}"' in printed
    # Users of the home page and of the search are the same, so either of the two may have the jobs.
    for names in ("home|search", "ads"):
        jobs = re.findall(rf'scenario_events_total{{admitted="yes",scenario="(?:{names})"}} (.+)', printed)
        assert sum(map(float, jobs)) > 0, printed
