"""The small relay of the benchmarks: settings that its processes read, and histories that fit its model."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from relaygr.bench.small_relay import NO_RESTART_LIMIT, history_of, own_prefix, small_config, small_settings
from relaygr.demo.processes import write_config
from relaygr.devbroker import LocalBroker
from relaygr.kafka.settings import KafkaSettings
from relaygr.settings import load_settings

LENGTH = 48


def test_the_processes_read_the_settings_that_a_benchmark_writes(embedded_broker: LocalBroker, tmp_path: Path) -> None:
    name = own_prefix(embedded_broker, "small")
    kafka = embedded_broker.settings(KafkaSettings(topic_prefix=name, group_prefix=name, partitions=12))
    settings = small_settings(kafka, tmp_path, {"hbm_bytes": 1 << 20}, supervisor=NO_RESTART_LIMIT)
    write_config(settings, tmp_path / "settings.yaml")
    found = load_settings(tmp_path / "settings.yaml", environment={})
    assert found.model_dump() == settings.model_dump()
    assert found.bootstrap == embedded_broker.bootstrap
    assert (found.worker.shared_path, found.supervisor.restarts_max) == (tmp_path / "shared", 1_000)


def test_every_run_has_the_same_histories_and_users_have_different_ones() -> None:
    config = small_config(LENGTH)
    first, again, other = (history_of(user, LENGTH) for user in ("user-00001", "user-00001", "user-00002"))
    assert first.version() == again.version() != other.version()
    items = first.behaviours.items
    assert len(items) == config.max_prefix_behaviours and 0 <= items.min() <= items.max() < config.vocabulary_size
    assert np.all(np.diff(first.behaviours.timestamps_ms) > 0)
