"""Refused starts of a worker: a sentence with a remedy and exit code 1."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from relaygr.cli.app import app
from relaygr.devbroker import LocalBroker
from relaygr.kafka.settings import KafkaSettings
from relaygr.runtime.private_files import private_folder, private_folders
from relaygr.worker.history.files import claim
from relaygr.worker.model.checkpoint import load_checkpoint, save_checkpoint
from relaygr.worker.shared.lock import ArenaLock, worker_folder
from tests.worlds.container import memory_limit
from tests.worlds.relay import environment

pytestmark = pytest.mark.slow

PARTITIONS = 12


@pytest.fixture(autouse=True)
def own_signals() -> Iterator[None]:
    """A worker that starts in this process takes the signals."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture(scope="module")
def kafka(embedded_broker: LocalBroker) -> KafkaSettings:
    """With topics."""
    own = KafkaSettings(topic_prefix="refusals", group_prefix="refusals", partitions=PARTITIONS)
    settings = embedded_broker.settings(own)
    embedded_broker.create_topics(settings)
    return settings


def words(kafka: KafkaSettings, model: Path, folder: Path, *settings: str) -> list[str]:
    own = [f"{name}={getattr(kafka, name)}" for name in ("bootstrap", "topic_prefix", "group_prefix", "partitions")]
    own += [
        f"worker.model={model}",
        f"worker.calibration={model / 'calibration.json'}",
        f"worker.history_path={folder / 'history'}",
        f"worker.shared_path={folder / 'shared'}",
        "worker.device=cpu",
    ]
    return ["worker", *(word for setting in [*own, *settings] for word in ("--set", setting))]


def refusal(kafka: KafkaSettings, model: Path, folder: Path, *settings: str) -> str:
    """The sentence with which the worker refuses to start."""
    done = CliRunner().invoke(app, words(kafka, model, folder, *settings), env={"COLUMNS": "1000"})
    assert (done.exit_code, type(done.exception)) == (1, SystemExit), done.exception
    return done.output


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("topic_prefix=nowhere", "relaygr topics create"),
        ("partitions=6", "set `partitions` to 12"),
        ("worker.history_path=/proc/nowhere/file", "worker.history_path"),  # Not even root creates files there.
        ("worker.hbm_bites=1GiB", "hbm_bites"),
        ("worker.hbm_bytes=2 potatoes", "hbm_bytes"),
        ("worker.device=cuda:63", "cuda"),
        ("worker.page_tokens=4096", "worker.hbm_bytes"),
        ("worker.dram_bytes=900TiB", "worker.dram_bytes"),
    ],
)
def test_a_setting_that_cannot_work_is_refused_by_name(
    kafka: KafkaSettings, model: Path, tmp_path: Path, setting: str, told: str
) -> None:
    said = refusal(kafka, model, tmp_path, "worker.hbm_bytes=1MiB", setting)
    assert told in said
    assert "delete the folder" not in said


def test_a_missing_broker_is_reported_with_its_address(kafka: KafkaSettings, model: Path, tmp_path: Path) -> None:
    assert "127.0.0.1:1 " in refusal(kafka, model, tmp_path, "bootstrap=127.0.0.1:1", "connect_timeout_s=0.5")


def test_a_model_whose_scores_are_not_finite_is_refused(kafka: KafkaSettings, model: Path, tmp_path: Path) -> None:
    """It became ready, and every request failed."""
    checkpoint = load_checkpoint(model)
    tensors = dict(checkpoint.tensors)
    tensors["items.weight"] = tensors["items.weight"] * 1e30
    diverged = tmp_path / "diverged"
    save_checkpoint(diverged, checkpoint.config, tensors)
    said = refusal(kafka, diverged, tmp_path)
    assert "not finite numbers" in said and "relaygr model rollback" in said


def without_weights(model: Path, folder: Path) -> Path:
    """A copy of the model without its weights."""
    copy = folder / "without weights"
    copy.mkdir()
    shutil.copy(model / "config.json", copy)
    return copy


def test_a_wrong_model_is_refused_though_no_broker_answers(kafka: KafkaSettings, model: Path, tmp_path: Path) -> None:
    said = refusal(kafka, tmp_path / "no model", tmp_path, "bootstrap=127.0.0.1:1")
    assert "a model is a folder with config.json" in said
    said = refusal(kafka, without_weights(model, tmp_path), tmp_path, "bootstrap=127.0.0.1:1")
    assert "model.safetensors does not exist" in said


def test_the_history_store_of_another_worker_is_refused_before_the_model_is_loaded(
    kafka: KafkaSettings, model: Path, tmp_path: Path
) -> None:
    private_folder(tmp_path / "history", "worker.history_path")
    broken = without_weights(model, tmp_path)
    (broken / "model.safetensors").touch()
    held = claim(tmp_path / "history", "worker-07")
    try:
        said = refusal(kafka, broken, tmp_path)
    finally:
        os.close(held)
    assert "worker-07" in said and "worker.history_path" in said


def test_a_second_process_with_the_same_id_on_one_machine_is_refused(
    kafka: KafkaSettings, model: Path, tmp_path: Path
) -> None:
    base, own = worker_folder(tmp_path / "shared", kafka.workers_group, "worker-07")
    lock = ArenaLock(private_folders(base, *own, setting="worker.shared_path"))
    lock.acquire()
    said = refusal(kafka, model, tmp_path, "worker.worker_id=worker-07", "worker.drain_s=0")
    assert f"worker-07 runs already on this machine, as process {os.getpid()}" in said
    lock.release()


def test_a_checkpoint_whose_sizes_disagree_is_refused(kafka: KafkaSettings, model: Path, tmp_path: Path) -> None:
    broken = tmp_path / "model"
    shutil.copytree(model, broken)
    config = json.loads((broken / "config.json").read_text())
    config["embedding_dim"] = 48
    (broken / "config.json").write_text(json.dumps(config))
    said = refusal(kafka, broken, tmp_path)
    assert "48" in said and "32" in said


def refusal_of_a_process(command: Sequence[str], within: Sequence[str] = ()) -> str:
    """As `refusal`, where the start had begun what only the end of a process ends. `within`: the words before it."""
    done = subprocess.run(
        [*within, sys.executable, "-m", "relaygr", *command],
        capture_output=True, text=True, timeout=180, env=environment(), check=False,
    )  # fmt: skip
    said = done.stderr + done.stdout
    assert done.returncode == 1 and "Traceback" not in said, said
    return said


def test_a_port_in_use_is_reported(kafka: KafkaSettings, model: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert str(port) in refusal_of_a_process(words(kafka, model, tmp_path, f"worker.http_port={port}"))


def test_a_plan_larger_than_the_limit_of_the_container_is_refused_before_allocation(
    kafka: KafkaSettings, model: Path, tmp_path: Path
) -> None:
    """The kernel would kill the worker without a line."""
    plan = ("worker.hbm_bytes=2GiB", "worker.dram_bytes=1GiB")
    with memory_limit(1200 << 20) as within:
        said = refusal_of_a_process(words(kafka, model, tmp_path, *plan), within)
    assert "worker.dram_bytes" in said and "worker.hbm_bytes" in said and "container" in said
