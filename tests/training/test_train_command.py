"""`relaygr train`, from a log in a file to the worth of longer histories."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from relaygr.cli.app import app
from relaygr.worker.model.checkpoint import load_checkpoint
from tests.training.made_logs import cyclic_log, write_inter

pytestmark = pytest.mark.slow  # They train.

SMALL = [
    "--dim", "16", "--epochs", "1", "--candidate-epochs", "1", "--places", "4", "--negatives", "7",
    "--max-history", "64", "--threads", "1", "--no-baselines",
]  # fmt: skip
TIMED = "user_id:token\titem_id:token\ttimestamp:float\n"


def train(*words: str | Path) -> Result:
    return CliRunner().invoke(app, ["train", *map(str, words)], catch_exceptions=False)


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inter(tmp_path_factory.mktemp("log") / "made.inter", cyclic_log(users=20, length=60))


@pytest.fixture(scope="module")
def run(log: Path) -> Path:
    folder = log.parent / "run"
    done = train("ranker", log, "--out", folder, *SMALL)
    assert done.exit_code == 0, done.output
    assert "sequence     1  retrieval" in done.output and "candidates   1  retrieval" in done.output
    assert "NDCG@10 of the cascade less that of popularity" in done.output
    return folder


def test_a_trained_checkpoint_is_one_of_the_worker(run: Path) -> None:
    checkpoint = load_checkpoint(run / "checkpoint")
    assert [task.name for task in checkpoint.config.tasks] == ["next", "liked"]
    shown = CliRunner().invoke(app, ["model", "show", str(run / "checkpoint")])
    assert shown.exit_code == 0 and "may grow" in shown.output and "valid at any time" in shown.output


def test_evaluate_writes_a_table_and_a_plot(run: Path) -> None:
    done = train("evaluate", run, "--min-behaviours", "40", "--candidates", "16", "--deadline-ms", "1000")
    assert done.exit_code == 0, done.output
    found = json.loads((run / "lengths.json").read_text())
    *doubled, longest = [point["length"] for point in found["points"]]
    assert doubled == [16, 32] and 32 < longest < 60, "the longest history is one without the test part"
    assert "T_full ms" in done.output and f"Deadline 1000 ms: truncation serves {longest}" in done.output
    assert (run / "lengths.png").stat().st_size > 5000


def test_evaluate_with_a_log_that_was_changed_is_refused(run: Path, tmp_path: Path) -> None:
    other = write_inter(tmp_path / "other.inter", cyclic_log(users=20, length=60, seed=1))
    done = train("evaluate", run, "--log", other)
    assert done.exit_code == 1 and "not the one" in done.output


def test_a_run_keeps_the_names_of_its_log(tmp_path: Path) -> None:
    """So `evaluate` reads the log again without them, and `publish --model` knows the codes of events."""
    made, rows = cyclic_log(users=20, length=60), []
    for user, name in enumerate(made.users):
        for at in range(made.starts[user], made.starts[user + 1]):
            time_s = int(made.times_ms[at]) // 1000
            rows.append({"uid": name, "sku": f"item {made.items[at]}", "at": time_s, "event": ("view", "buy")[at % 2]})
    log, run = tmp_path / "events.jsonl", tmp_path / "run"
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    columns = ["--columns", "user=uid,item=sku,time=at,action=event"]
    done = train("ranker", log, "--out", run, *columns, "--actions", "view=1,buy=2", *SMALL)
    assert done.exit_code == 0, done.output
    done = train("evaluate", run, "--min-behaviours", "40", "--candidates", "16")
    assert done.exit_code == 0, done.output
    publish = ["publish", "history", "--interactions", str(log), "--model", str(run / "checkpoint"), "--dry-run"]
    done = CliRunner().invoke(app, [*publish, *columns])
    assert done.exit_code == 0 and "1, 2 (view=1, buy=2)" in done.output


def test_a_finished_run_is_not_trained_again(run: Path, log: Path) -> None:
    done = train("ranker", log, "--out", run, *SMALL)
    assert done.exit_code == 1 and "has a finished run" in done.output


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("user_id:token\titem_id:token\nann\t1\nann\t2\n", "no time of the behaviours"),
        (
            "user_id:token\titem_id:token\ttimestamp:float\n" + "".join(f"u{n}\t1\t9e8\n" for n in range(9)),
            "no user has",
        ),
        ("user_id:token\titem_id:token\ttimestamp:float\n" + "ann\t1\t9e8\n" * 9, "same time"),
        ("user_id:token\titem_id:token\ttimestamp:float\n", "The log has 0 behaviours"),
    ],
    ids=["no time", "one row for each user", "one time", "empty"],
)
def test_a_log_that_cannot_be_split_is_refused(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "bad.inter").write_text(content)
    done = train("ranker", tmp_path / "bad.inter", "--out", tmp_path / "run")
    assert done.exit_code == 1 and said in done.output.replace("\n", " ")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--ties", "random"], "give hash or file"),
        (["--protocol", "random"], "give one of time, leave-one-out, global-time"),
        (["--dim", "15", "--heads", "2"], "no multiple of --heads 2"),
    ],
)
def test_options_that_make_no_model_are_refused(log: Path, tmp_path: Path, words: list[str], said: str) -> None:
    done = train("ranker", log, "--out", tmp_path / "run", *words)
    assert done.exit_code == 1 and said in done.output.replace("\n", " ")


def test_a_seed_that_is_too_large_is_refused_and_the_largest_is_taken(log: Path, tmp_path: Path) -> None:
    """`date +%s%N` is a usual seed."""
    refused = train("ranker", log, "--out", tmp_path / "run", "--seed", "1764400000000000000", *SMALL)
    assert refused.exit_code == 2 and "10000000000000" in refused.output and not (tmp_path / "run").exists()
    taken = train("ranker", log, "--out", tmp_path / "run", "--seed", str(10**13), *SMALL)
    assert taken.exit_code == 0, taken.output


def test_a_log_without_an_order_in_its_times_is_trained_and_its_card_and_last_line_say_so(tmp_path: Path) -> None:
    """The same rows in another order of the file are the same log, and `evaluate` reads them as the run did."""
    made = cyclic_log(users=20, length=60)
    days = replace(made, times_ms=made.times_ms // 86_400_000 * 86_400_000)
    days.times_ms[made.starts[1:] - 1] += 86_400_000  # Two days, since a log of one is refused.
    log = write_inter(tmp_path / "days.inter", days)
    header, *rows = log.read_text().splitlines()
    digests = {}
    for ties in ("hash", "file"):
        done = train("ranker", log, "--out", tmp_path / ties, "--ties", ties, *SMALL)
        assert done.exit_code == 0, done.output
        said = {"hash": "ordered by a hash of the row", "file": "ordered as in the file"}[ties]
        last = done.output.strip().splitlines()[-1]
        assert last.startswith("Note: ") and said in last and "share their time" in last
        card = (tmp_path / ties / "checkpoint" / "README.md").read_text()
        assert f"and are {said}" in card and last.removeprefix("Note: ") in card
        assert "For 100% of the users the first behaviour of the test has the time of the one before it" in card
        described = json.loads((tmp_path / ties / "run.json").read_text())
        assert described["ties"] == ties and described["log"]["ties_share"] > 0.9
        digests[ties] = described["log"]["digest"]
    assert digests["hash"] != digests["file"]
    # Users keep their order of first appearance, which is part of the digest.
    log.write_text("\n".join([header, *sorted(rows, key=lambda row: (int(row[1:].split("\t")[0]), row[::-1]))]) + "\n")
    done = train("evaluate", tmp_path / "hash", "--min-behaviours", "40", "--candidates", "16")
    assert done.exit_code == 0, done.output
    assert "share their time" in done.output.strip().splitlines()[-1]
    done = train("evaluate", tmp_path / "file", "--min-behaviours", "40", "--candidates", "16")
    assert done.exit_code == 1 and "not the one" in done.output


@pytest.mark.parametrize(("factor", "said"), [(0.2, "0.0% of the ratings"), (20.0, "100.0% of the ratings")])
def test_ratings_of_another_scale_train_no_constant_liked(tmp_path: Path, factor: float, said: str) -> None:
    made = cyclic_log(users=20, length=60)
    log = write_inter(tmp_path / "log.inter", replace(made, actions=(made.actions * factor).astype(np.uint16)))
    done = train("ranker", log, "--out", tmp_path / "run", *SMALL)
    assert done.exit_code == 0, done.output
    last = done.output.strip().splitlines()[-1]
    assert "no task `liked`" in last and said in last and "convert it to stars" in last
    checkpoint = tmp_path / "run" / "checkpoint"
    assert [task.name for task in load_checkpoint(checkpoint).config.tasks] == ["next"]
    card = (checkpoint / "README.md").read_text()
    assert last.removeprefix("Note: ") in card and "`liked` is the probability" not in card


def test_the_ranker_and_the_json_of_a_run_agree(run: Path) -> None:
    metrics = json.loads((run / "metrics.json").read_text())
    lines = [json.loads(line) for line in (run / "predictions" / "ranker.jsonl").read_text().splitlines()]
    hits = [bool(set(line["top"]) & set(line["held_out"])) for line in lines]
    assert metrics["test"]["ranker"]["hr@10"]["mean"] == pytest.approx(sum(hits) / len(hits))
