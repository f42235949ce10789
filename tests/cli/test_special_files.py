"""A pipe that nobody writes, in place of a file: an error at once, and no wait without an end. A pipe is no fault where
a text is read once from its beginning to its end, as the shell's `<(...)` gives it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from relaygr.cli.options import require_writable
from relaygr.compare.requests import read_requests
from relaygr.ingest.reading import read_interactions
from relaygr.kafka.security import SecurityFiles, librdkafka_security, password_of, read_token
from relaygr.kafka.settings import Security
from relaygr.runtime.errors import RelayError
from relaygr.settings import load_settings
from relaygr.simulate.times import load_times
from relaygr.training.movielens import Size, get_movielens
from relaygr.training.retrieval import GraphSearch
from relaygr.training.runs import STATE_FILE, Run
from relaygr.worker.calibration import load_calibration
from relaygr.worker.model.checkpoint import load_checkpoint, random_checkpoint, resident_bytes, save_checkpoint
from relaygr.worker.model.config import CONFIG_FILE, WEIGHTS_FILE
from relaygr.worker.model.convert.state_dict import read_state_dict
from relaygr.worker.model.convert.torcheasyrec import read_pipeline
from relaygr.worker.model.inputs.known import ACTIONS_FILE, read_action_names, read_vocabulary
from relaygr.worker.model.npy import read_npy, read_npz
from relaygr.worker.pool.build import read_secret
from tests.waiting import outcome
from tests.worlds.model import small_config

CONFIG = small_config()
READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "weights": (WEIGHTS_FILE, lambda path: load_checkpoint(path.parent)),
    "weights' item ids": (WEIGHTS_FILE, lambda path: read_vocabulary(path.parent, CONFIG)),
    "a model's configuration": (CONFIG_FILE, lambda path: load_checkpoint(path.parent)),
    "names of actions": (ACTIONS_FILE, lambda path: read_action_names(path.parent)),
    "a calibration": ("calibration.json", load_calibration),
    "a state dict": ("model.pt", read_state_dict),
    "another model's weights": ("a.safetensors", read_state_dict),
    "a configuration of TorchEasyRec": ("pipeline.config", read_pipeline),
    "an array": ("ids.npy", read_npy),
    "arrays": ("requests.npz", read_npz),
    "requests": ("requests.parquet", lambda path: read_requests(path, path, CONFIG)),
    "a log": ("log.csv", read_interactions),
    "a data set": ("ml-1m.zip", lambda path: get_movielens(path.parent / "out", Size.MEDIUM, path)),
    "times": ("times.json", load_times),
    "a graph": ("retrieval.safetensors", GraphSearch),
    "a run": ("run.json", lambda path: Run(path.parent).read_json(path.name)),
    "a run's state": (STATE_FILE, lambda path: Run(path.parent).load_state()),
    "a secret": ("secret", read_secret),
    "a token": ("token", read_token),
    "a password": ("password", lambda path: password_of(Security.model_construct(sasl_password_file=path))),
    "a certificate": (
        "ca.pem",
        lambda path: librdkafka_security(Security.model_validate({"protocol": "SSL", "ca_file": path})),
    ),
}


@pytest.mark.parametrize("kind", READERS)
def test_a_pipe_in_place_of_a_file_is_an_error_at_once(tmp_path: Path, kind: str) -> None:
    name, read = READERS[kind]
    if name in (WEIGHTS_FILE, CONFIG_FILE):
        save_checkpoint(tmp_path, CONFIG, random_checkpoint(CONFIG, seed=1).tensors)
        (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    error = outcome(lambda: read(tmp_path / name))
    assert isinstance(error, (RelayError, OSError)) and "not a regular file" in str(error)


def test_a_pipe_for_what_a_command_writes_is_not_waited_for_before_there_is_anything_to_write(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "out")
    assert outcome(lambda: require_writable("--out", tmp_path / "out")) is None


def test_the_memory_for_weights_that_are_a_pipe_is_none(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / WEIGHTS_FILE)
    assert outcome(lambda: resident_bytes(tmp_path, 0, torch.float32, "cpu")) == 0


def test_a_certificate_that_becomes_a_pipe_is_no_change(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").touch()
    files = SecurityFiles(Security.model_validate({"protocol": "SSL", "ca_file": tmp_path / "ca.pem"}))
    (tmp_path / "ca.pem").unlink()
    os.mkfifo(tmp_path / "ca.pem")
    assert outcome(files.changed) is False


def test_settings_may_come_from_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "settings")
    writer = threading.Thread(target=(tmp_path / "settings").write_text, args=("topic_prefix: piped\n",), daemon=True)
    writer.start()
    assert load_settings(tmp_path / "settings", environment={}).topic_prefix == "piped"
