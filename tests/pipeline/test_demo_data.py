"""`relaygr demo --data` on a log: it trains, plays what users did next, and takes a new checkpoint while it runs."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from relaygr.cli.app import app
from relaygr.demo.data import locked, trained_run
from relaygr.runtime.errors import RelayError
from relaygr.traffic.held_out import FoundCandidates, HeldOutPopulation
from relaygr.traffic.population import population_of
from relaygr.traffic.records import read_records
from relaygr.traffic.schedule import impressions
from relaygr.traffic.settings import TrafficSettings
from relaygr.training.logs import Log
from relaygr.training.pipeline import Progress, train_ranker
from relaygr.training.runs import Run
from tests.training.made_logs import QUICK, Recorder, cyclic_log, write_inter
from tests.waiting import until
from tests.worlds.relay import environment

pytestmark = pytest.mark.slow

LOG = cyclic_log(users=30, length=80)
# In the order of their ids, as in a log that is read from a file.
LOG = replace(LOG, users=sorted(LOG.users))
USERS = 12


def trained(folder: Path, log: Path, seed: int) -> Path:
    progress = Progress(Recorder(), lambda name, steps: None, lambda: None)
    train_ranker(LOG, [log], replace(QUICK, seed=seed, epochs=2), Run(folder), progress, with_baselines=False)
    return folder / "checkpoint"


def part_of(log: Log, kept: np.ndarray) -> Log:
    owners = np.repeat(np.arange(len(log.users)), log.lengths)[kept]
    starts = np.searchsorted(owners, np.arange(len(log.users) + 1))
    return replace(log, starts=starts, items=log.items[kept], actions=log.actions[kept], times_ms=log.times_ms[kept])


def relaygr(*command: str | Path) -> str:
    done = CliRunner().invoke(app, list(map(str, command)))
    assert done.exit_code == 0, done.output
    return done.output


def test_a_checkpoint_is_deployed_into_the_running_demo_and_no_request_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Whatever else the machine does.
    monkeypatch.setattr("relaygr.worker.calibration.FIT_ERROR_BOUND", math.inf)
    data, kept = tmp_path / "data", tmp_path / "kept"
    data.mkdir()
    log = write_inter(data / "log.inter", LOG)
    trained(data / "ranker", log, seed=1)
    new = trained(tmp_path / "new", log, seed=2)
    relaygr("calibrate", "--model", new, "--out", new / "calibration.json", "--budget-s", "1")
    demo = subprocess.Popen(
        [sys.executable, "-m", "relaygr", "demo", "--broker", "embedded", "--no-ui", "--data", str(data), "--keep",
         str(kept), "--rate", "4", "--deadline-ms", "5000", "--set", f"traffic.users={USERS}"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True,
        env={**environment(), "COLUMNS": "200"},
    )  # fmt: skip
    try:
        played = kept / "relay.jsonl"
        until(lambda: played.exists() and len(played.read_text().split()) > 5, "some requests are answered", 120)
        relaygr("model", "deploy", new, data / "deployed")
        said, _ = demo.communicate(timeout=240)
    finally:
        demo.kill()
        demo.wait()
    assert "Traceback" not in said, said
    records = sorted(read_records(played), key=lambda each: each.number)
    behaviours = sum(length // 10 for length in sorted(LOG.lengths.tolist())[-USERS:])
    assert len(records) == behaviours, "all test behaviours are played"
    assert {each.status for each in records} == {"ranked"}
    revisions = [each.model_revision for each in records]
    assert len(set(revisions)) == 2, "both checkpoints have served"
    assert all(each.next_retrieved is not None for each in records)
    assert "NDCG@10" in said
    for gate in ("no request lost:", "cached scores equal full scores:", "requests compared:"):
        assert next(line for line in said.splitlines() if gate in line).startswith("yes"), said
    assert "were answered by different models, and are left out" in said


def test_a_retrieval_file_finds_the_candidates(tmp_path: Path) -> None:
    data, kept = tmp_path / "data", tmp_path / "kept"
    data.mkdir()
    trained(data / "ranker", write_inter(data / "log.inter", LOG), seed=1)
    halves = [
        write_inter(tmp_path / f"{name}.inter", part_of(LOG, LOG.items % 2 == half))
        for half, name in enumerate(("target", "source"))
    ]
    relaygr(
        "train", "retrieval", *halves, "--out", tmp_path / "run", "--seeds", "1", "--intra-steps", "2",
        "--inter-steps", "2",
    )  # fmt: skip
    file = tmp_path / "run" / "retrieval.safetensors"
    said = relaygr(
        "demo", "--broker", "embedded", "--no-ui", "--data", data, "--keep", kept, "--retrieval", file, "--rate", "8",
        "--deadline-ms", "5000", "--set", "traffic.users=3", "--set", "traffic.candidates=20",
    )  # fmt: skip
    assert "NDCG@10" in said
    records = list(read_records(kept / "relay.jsonl"))
    settings = TrafficSettings(held_out=data / "ranker", retrieval=file, users=3, suffix=0, candidates=20)
    population = population_of(settings)
    assert isinstance(population, HeldOutPopulation)
    of_file = FoundCandidates(data / "ranker", settings, population)
    expected = {each.number: each.next_item in of_file.of(each) for each in impressions(settings, population)}
    assert {each.number: each.next_retrieved for each in records} == expected
    own = FoundCandidates(data / "ranker", settings.model_copy(update={"retrieval": None}), population)
    first = next(iter(impressions(settings, population)))
    assert not np.array_equal(own.of(first), of_file.of(first))


def test_a_retrieval_file_without_a_log_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = CliRunner().invoke(app, ["demo", "--retrieval", str(tmp_path / "file")])
    assert done.exit_code == 1 and "give --data DIR" in done.output


def test_the_ranker_is_trained_within_the_time_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relaygr.demo.data.TRAINING_MINUTES", 0.05)
    write_inter(tmp_path / "log.inter", LOG)
    console = Console(quiet=True)
    run = trained_run(console, tmp_path)
    assert run.is_finished
    before = (run.checkpoint / "model.safetensors").stat().st_mtime_ns
    assert (trained_run(console, tmp_path).checkpoint / "model.safetensors").stat().st_mtime_ns == before


def test_a_second_demo_on_the_folder_is_refused(tmp_path: Path) -> None:
    with locked(tmp_path), pytest.raises(RelayError, match="Another demo"), locked(tmp_path):
        raise AssertionError
    with locked(tmp_path):
        pass


def test_a_folder_without_a_log_says_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(RelayError, match="relaygr data movielens"):
        trained_run(Console(quiet=True), tmp_path)
