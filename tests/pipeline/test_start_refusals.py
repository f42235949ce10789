"""Refused starts of a worker: a message with a remedy and exit code 1, without a traceback."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from relaygr.kafka.settings import KafkaSettings
from relaygr.runtime.private_files import private_folder
from relaygr.worker.history.files import claim
from relaygr.worker.model.checkpoint import load_checkpoint, save_checkpoint
from tests.worlds.container import memory_limit
from tests.worlds.relay import environment

pytestmark = pytest.mark.slow


def run_worker(
    kafka: KafkaSettings | None, model: Path, folder: Path, *settings: str, within: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """`within`: the words before the command."""
    arguments = [*within, sys.executable, "-m", "relaygr", "worker"]
    own = [
        f"worker.model={model}",
        f"worker.calibration={model / 'calibration.json'}",
        f"worker.history_path={folder / 'history'}",
        f"worker.shared_path={folder / 'shared'}",
        "worker.device=cpu",
    ]
    if kafka is not None:
        own += [
            f"bootstrap={kafka.bootstrap}",
            f"topic_prefix={kafka.topic_prefix}",
            f"group_prefix={kafka.group_prefix}",
            f"partitions={kafka.partitions}",
        ]
    for setting in [*own, *settings]:
        arguments += ["--set", setting]
    return subprocess.run(arguments, capture_output=True, text=True, timeout=180, env=environment(), check=False)


def refusal(run: subprocess.CompletedProcess[str]) -> str:
    """The error message of the worker. Fails if the worker started or printed a traceback."""
    said = run.stderr + run.stdout
    assert run.returncode == 1, said
    assert "Traceback" not in said, said
    return said


@pytest.fixture
def kafka(embedded_broker) -> KafkaSettings:
    return embedded_broker.settings(KafkaSettings(topic_prefix="refusals", group_prefix="refusals", partitions=12))


@pytest.fixture
def kafka_with_topics(embedded_broker, kafka) -> KafkaSettings:
    embedded_broker.create_topics(kafka)
    return kafka


def test_a_missing_broker_is_reported_within_five_seconds_with_its_address(model, tmp_path):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{closed.getsockname()[1]}"
    started_s = time.monotonic()
    said = refusal(run_worker(None, model, tmp_path, f"bootstrap={address}"))
    assert address in said
    # 4 s of waiting, and the time to import torch on a busy machine.
    assert time.monotonic() - started_s < 5 + 20


def test_missing_topics_are_reported_with_the_command_that_creates_them(embedded_broker, model, tmp_path):
    kafka = embedded_broker.settings(KafkaSettings(topic_prefix="nowhere", group_prefix="nowhere", partitions=12))
    said = refusal(run_worker(kafka, model, tmp_path))
    assert "relaygr topics create" in said


def test_another_partition_count_is_refused(kafka_with_topics, model, tmp_path):
    said = refusal(run_worker(kafka_with_topics.model_copy(update={"partitions": 6}), model, tmp_path))
    assert "12" in said and "6" in said


def test_a_model_whose_scores_are_not_finite_is_refused(kafka_with_topics, model, tmp_path):
    """It became ready, and every request failed."""
    checkpoint = load_checkpoint(model)
    tensors = dict(checkpoint.tensors)
    tensors["items.weight"] = tensors["items.weight"] * 1e30
    diverged = tmp_path / "diverged"
    save_checkpoint(diverged, checkpoint.config, tensors)
    said = refusal(run_worker(kafka_with_topics, diverged, tmp_path))
    assert "not finite numbers" in said and "relaygr model rollback" in said


def test_a_path_that_cannot_be_written_is_refused_with_its_setting(kafka_with_topics, model, tmp_path):
    """Nobody, not even root, creates files in /proc."""
    said = refusal(run_worker(kafka_with_topics, model, tmp_path, "worker.history_path=/proc/nowhere/file"))
    assert "worker.history_path" in said
    assert "delete the folder" not in said


def test_a_wrong_model_is_refused_though_no_broker_answers(tmp_path):
    said = refusal(run_worker(None, tmp_path / "no model", tmp_path, "bootstrap=127.0.0.1:1"))
    assert "a model is a folder with config.json" in said


def without_weights(model, folder, *, empty=False):
    """A copy of the model without its weights, or with an empty file of them."""
    copy = folder / "without weights"
    copy.mkdir()
    shutil.copy(model / "config.json", copy)
    if empty:
        (copy / "model.safetensors").touch()
    return copy


def test_a_model_without_weights_is_refused_though_no_broker_answers(model, tmp_path):
    said = refusal(run_worker(None, without_weights(model, tmp_path), tmp_path, "bootstrap=127.0.0.1:1"))
    assert "model.safetensors does not exist" in said


def test_the_history_store_of_another_worker_is_refused_before_the_model_is_loaded(kafka_with_topics, model, tmp_path):
    private_folder(tmp_path / "history", "worker.history_path")
    held = claim(tmp_path / "history", "worker-07")
    try:
        said = refusal(run_worker(kafka_with_topics, without_weights(model, tmp_path, empty=True), tmp_path))
    finally:
        os.close(held)
    assert "worker-07" in said and "worker.history_path" in said


def test_an_unknown_setting_is_refused_by_name(model, tmp_path):
    said = refusal(run_worker(None, model, tmp_path, "worker.hbm_bites=1GiB"))
    assert "hbm_bites" in said


def test_a_wrong_unit_is_refused(model, tmp_path):
    said = refusal(run_worker(None, model, tmp_path, "worker.hbm_bytes=2 potatoes"))
    assert "hbm_bytes" in said


def test_a_checkpoint_whose_sizes_disagree_is_refused(kafka_with_topics, model, tmp_path):
    broken = tmp_path / "model"
    shutil.copytree(model, broken)
    config = json.loads((broken / "config.json").read_text())
    config["embedding_dim"] = 48
    (broken / "config.json").write_text(json.dumps(config))
    said = refusal(run_worker(kafka_with_topics, broken, tmp_path))
    assert "48" in said and "32" in said


def test_a_port_in_use_is_reported(kafka_with_topics, model, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        said = refusal(run_worker(kafka_with_topics, model, tmp_path, f"worker.http_port={port}"))
    assert str(port) in said


def test_a_missing_device_is_reported(kafka_with_topics, model, tmp_path):
    said = refusal(run_worker(kafka_with_topics, model, tmp_path, "worker.device=cuda:63"))
    assert "cuda" in said


def test_an_hbm_tier_too_small_for_one_prefix_is_reported_with_the_needed_size(kafka_with_topics, model, tmp_path):
    said = refusal(
        run_worker(
            kafka_with_topics, model, tmp_path, "worker.hbm_bytes=1MiB", "worker.page_tokens=4096",
            f"worker.calibration={model / 'calibration.json'}",
        )
    )  # fmt: skip
    assert "worker.hbm_bytes" in said or "page_tokens" in said


def test_a_plan_larger_than_the_limit_of_the_container_is_refused_before_allocation(kafka_with_topics, model, tmp_path):
    """The kernel would kill the worker without a line."""
    with memory_limit(1200 << 20) as within:
        said = refusal(
            run_worker(
                kafka_with_topics, model, tmp_path, "worker.hbm_bytes=2GiB", "worker.dram_bytes=1GiB", within=within
            )
        )
    assert "worker.dram_bytes" in said and "worker.hbm_bytes" in said and "container" in said


def test_a_plan_larger_than_the_machines_memory_is_refused_before_allocation(kafka_with_topics, model, tmp_path):
    said = refusal(run_worker(kafka_with_topics, model, tmp_path, "worker.dram_bytes=900TiB"))
    assert "worker.dram_bytes" in said
