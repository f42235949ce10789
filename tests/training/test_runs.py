"""Runs: the same seed gives the same checkpoint, interrupted or not; nothing of the test part leaks into it."""

from __future__ import annotations

import datetime
import json
import math
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from relaygr.compare.requests import Request
from relaygr.compare.running import Scorer
from relaygr.runtime.errors import RelayError
from relaygr.schemas.messages import Behaviours
from relaygr.training import sampling
from relaygr.training.logs import Log
from relaygr.training.models import CASCADE, RANKER, RETRIEVAL, CascadeModel, RankerModel, RetrievalModel
from relaygr.training.options import Protocol, Stage, TrainingOptions
from relaygr.training.pipeline import Finished, Progress, train_ranker
from relaygr.training.ranker import (
    Batch,
    Size,
    bias_by_place,
    candidate_logits,
    initial_tensors,
    ranker_config,
    score_items,
    search_row,
)
from relaygr.training.ranking import NDCG
from relaygr.training.runs import STATE_FILE, Run
from relaygr.training.sampling import FOUND, candidate_batches, sequence_batches, with_found_negatives
from relaygr.training.sequence_loss import cosines
from relaygr.training.splits import Part, Split, split_log
from relaygr.training.trainer import learning_rate, train
from relaygr.worker.device import open_device
from relaygr.worker.model.checkpoint import load_checkpoint
from tests.training.made_logs import QUICK, Recorder, cyclic_log, revision_of, with_test_behaviours
from tests.training.test_logs import log_of

pytestmark = pytest.mark.slow  # They train.

LOG = cyclic_log()
TOLERANCE = 2e-5


def trained(
    folder: Path,
    log: Log = LOG,
    options: TrainingOptions = QUICK,
    recorder: Recorder | None = None,
    with_baselines: bool = False,
) -> Finished:
    return train_ranker(
        log,
        [],
        options,
        Run(folder),
        Progress(recorder or Recorder(), lambda name, steps: None, lambda: None),
        with_baselines=with_baselines,
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("runs") / "run"
    trained(folder, options=replace(QUICK, epochs=12, candidate_epochs=4, learning_rate=5e-3), with_baselines=True)
    return Run(folder)


def test_the_ranker_beats_popularity_where_histories_say_more(run: Run) -> None:
    found = run.read_json("metrics.json")
    for name in (CASCADE, RETRIEVAL, RANKER):
        assert found["test"][name][NDCG]["mean"] > 2 * found["test"]["popularity"][NDCG]["mean"], name
    assert found["gains"]["popularity"]["low"] > 0
    assert found["test"][RANKER]["auc"]["low"] > 0.5, "even items are liked"


def test_a_run_has_its_files_and_no_state_is_left(run: Run) -> None:
    found = {path.relative_to(run.folder).as_posix() for path in run.folder.rglob("*") if path.is_file()}
    assert found == {
        "run.json", "metrics.json", "training.png", "checkpoint/config.json", "checkpoint/model.safetensors",
        "checkpoint/README.md", "predictions/cascade.jsonl", "predictions/retrieval.jsonl", "predictions/ranker.jsonl",
        "predictions/popularity.jsonl", "predictions/ials.jsonl", "predictions/item-neighbours.jsonl",
    }  # fmt: skip
    card = (run.checkpoint / "README.md").read_text()
    assert revision_of(run) in card and "weak evidence" in card and "popularity" in card


def requests_of(log: Log) -> list[Request]:
    """Histories of several lengths, one with unknown items and actions, and candidates of which one is unknown."""
    random = np.random.default_rng(0)
    requests = []
    for length in (0, 1, 7, 30, 64):
        items = random.choice(np.unique(log.items), length)
        actions = random.choice(np.array([4, 10, 200], np.uint16), length)
        if length == 30:
            items[::3] = 10**9
        behaviours = Behaviours(items.astype(np.int64), actions, np.arange(length, dtype=np.int64) * 1000)
        candidates = np.append(random.choice(np.unique(log.items), 12, replace=False), 10**9).astype(np.int64)
        requests.append(Request(behaviours, np.zeros(0, np.int64), candidates, 0, np.zeros((13, 2))))
    return requests


def test_the_trainers_scores_are_the_workers(run: Run) -> None:
    """Full and cached inference of the worker's engine, for what the trainer wrote."""
    checkpoint = load_checkpoint(run.checkpoint)
    requests = requests_of(LOG)
    scorer = Scorer(checkpoint, open_device("cpu"), requests)
    ids, config = checkpoint.tensors["items.ids"].numpy(), checkpoint.config
    for request, full, cached in zip(
        requests, scorer.full(requests).scores, scorer.cached(requests).scores, strict=True
    ):
        rows = [np.where(np.isin(each, ids), np.searchsorted(ids, each), len(ids)) for each in
                (request.behaviours.items, request.candidates)]  # fmt: skip
        logits = score_items(
            config, dict(checkpoint.tensors), rows[0].astype(np.int32), request.behaviours.actions,
            torch.from_numpy(rows[1]),
        )  # fmt: skip
        ours = np.stack((logits[:, 0].numpy(), torch.sigmoid(logits[:, 1]).numpy()), axis=1)
        for scores in (full, cached):
            assert np.abs(scores - ours).max() <= TOLERANCE * np.abs(ours).max(), len(request.behaviours)


def test_a_candidate_of_a_batch_has_the_score_that_it_has_alone(run: Run) -> None:
    """Neither padding, nor the candidates beside it, nor the behaviours after its place change it."""
    checkpoint = load_checkpoint(run.checkpoint)
    config, tensors = checkpoint.config, dict(checkpoint.tensors)
    split = split_log(LOG, Protocol.TIME)
    _, batch = next(candidate_batches(split, 0, 0, places=4, negatives=3, max_history=64))
    together = candidate_logits(config, tensors, batch.inputs)
    inputs = batch.inputs
    for user in range(inputs.items.shape[0]):
        place = int(inputs.places[user, 0])
        alone = Batch(
            inputs.items[user : user + 1, :place],
            inputs.actions[user : user + 1, :place],
            inputs.candidates[user : user + 1, :1, 1:2],
            inputs.places[user : user + 1, :1],
        )
        assert torch.allclose(candidate_logits(config, tensors, alone)[0, 0, 0], together[user, 0, 1], atol=1e-5)


@pytest.mark.parametrize("length", [1, 2, 5, 7])
def test_the_bias_by_place_is_that_of_each_distance(length: int) -> None:
    bias = torch.randn(17, generator=torch.Generator().manual_seed(0))
    expected = [[bias[8 - (place - key)] for key in range(length)] for place in range(length + 1)]
    assert torch.equal(bias_by_place(bias, length), torch.tensor(expected))


def test_the_same_seed_gives_the_same_checkpoint_and_another_seed_another(tmp_path: Path) -> None:
    for name, seed in (("one", 3), ("two", 3), ("three", 4)):
        trained(tmp_path / name, options=replace(QUICK, epochs=1, seed=seed, threads=2))
    one, two, three = (revision_of(Run(tmp_path / name)) for name in ("one", "two", "three"))
    assert one == two != three


def test_an_interrupted_run_goes_on_to_the_checkpoint_of_one_that_was_not(tmp_path: Path) -> None:
    trained(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path / "cut", recorder=Recorder(stop_after=1))
    assert (tmp_path / "cut" / STATE_FILE).exists()
    later = Recorder()
    trained(tmp_path / "cut", recorder=later)
    assert later.epochs == STAGES[1:]
    assert revision_of(Run(tmp_path / "cut")) == revision_of(Run(tmp_path / "whole"))


STAGES = [(Stage.SEQUENCE, 0), (Stage.SEQUENCE, 1), (Stage.SEQUENCE, 2), (Stage.CANDIDATES, 0), (Stage.CANDIDATES, 1)]


@pytest.mark.parametrize("done", [3, 4], ids=["between the stages", "among the candidates"])
def test_a_run_that_was_killed_later_goes_on_where_it_was(tmp_path: Path, done: int) -> None:
    trained(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path / "cut", recorder=Recorder(stop_after=done))
    later = Recorder()
    trained(tmp_path / "cut", recorder=later)
    assert later.epochs == STAGES[done:]
    assert revision_of(Run(tmp_path / "cut")) == revision_of(Run(tmp_path / "whole"))


def test_a_folder_with_another_run_is_refused_with_the_difference(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    with run.begun(QUICK, LOG, []):
        pass
    with pytest.raises(RelayError, match="dim is 16 there and 32 here"), run.begun(replace(QUICK, dim=32), LOG, []):
        pass
    with pytest.raises(RelayError, match="digest is"), run.begun(QUICK, cyclic_log(seed=1), []):
        pass
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("mine")
    with pytest.raises(RelayError, match="files that are no run"), Run(tmp_path / "other").begun(QUICK, LOG, []):
        pass


def test_one_training_at_a_time_is_in_a_folder_and_a_finished_run_stays(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    with run.begun(QUICK, LOG, []), pytest.raises(RelayError, match="is in use by another `relaygr train`"):
        trained(tmp_path / "run")
    run.write_json("metrics.json", {"epochs": 3})
    with pytest.raises(RelayError, match="has a finished run"):
        trained(tmp_path / "run")
    assert run.read_json("metrics.json") == {"epochs": 3}, "the other process finished it while this one read the log"


def test_files_of_the_file_system_and_of_a_killed_run_are_nobodys(tmp_path: Path) -> None:
    """A volume has `lost+found` at its root."""
    (tmp_path / "lost+found").mkdir(mode=0)
    (tmp_path / ".run.json.partial").write_bytes(b"")
    with Run(tmp_path).begun(QUICK, LOG, []):
        assert {each.name for each in tmp_path.iterdir()} == {"lost+found", "run.json"}


def test_a_run_whose_disk_is_full_again_and_again_goes_on_with_the_same_command(tmp_path: Path) -> None:
    folder, complaints = tmp_path / "run", []
    options = replace(QUICK, epochs=1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    largest_bytes = 512
    while not Run(folder).is_finished:
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (largest_bytes, before[1]))
            trained(folder, options=options)
        except RelayError as error:
            complaints.append(str(error))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert not list(folder.rglob(".*")), "what is left of a file would keep a disk full"
        largest_bytes *= 8
    assert len(complaints) > 1 and all("File too large" in each for each in complaints), complaints
    assert load_checkpoint(Run(folder).checkpoint).config.num_layers == options.layers


NO_CACHE = """
import sys

class NoCache:
    def find_spec(self, name, *_):
        if name.startswith("matplotlib."):
            raise OSError("set the MPLCONFIGDIR environment variable to a writable directory")

sys.meta_path.insert(0, NoCache())
from relaygr.cli.__main__ import main
main()
"""


@pytest.mark.parametrize("words", [("ranker", "log.inter", "--out", "run"), ("retrieval", "a", "b", "--out", "run")])
def test_a_library_that_cannot_have_its_cache_is_one_sentence(tmp_path: Path, words: tuple[str, ...]) -> None:
    """torchmetrics imports matplotlib, which refuses a read-only file system."""
    done = subprocess.run(
        [sys.executable, "-c", NO_CACHE, "train", *words], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert line.startswith("torchmetrics cannot be imported: set the MPLCONFIGDIR environment variable")


class _NoCache:
    """matplotlib in a container whose file system is read-only."""

    def find_spec(self, name: str, *_: object) -> None:
        if name.startswith("matplotlib"):
            raise OSError("Matplotlib requires access to a writable cache directory")


def test_a_plot_that_cannot_be_drawn_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [each for each in sys.modules if each.startswith("matplotlib")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [_NoCache(), *sys.meta_path])
    finished = trained(tmp_path / "run", options=replace(QUICK, epochs=1))
    assert "training.png was not drawn: Matplotlib requires access" in finished.notes[-1]
    assert Run(tmp_path / "run").is_finished


def test_a_broken_state_is_refused_and_named(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    with run.begun(QUICK, LOG, []):
        pass
    (run.folder / STATE_FILE).write_bytes(b"half")
    with pytest.raises(RelayError, match="broken: remove it"):
        train(split_log(LOG, Protocol.TIME), QUICK, run, Recorder())


def test_the_state_of_another_release_is_refused_and_named(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    with run.begun(QUICK, LOG, []):
        run.save_state({"tensors": {}, "best": {}, "best_epoch": 0, "epochs": [], "optimizer": {}})
    with pytest.raises(RelayError, match="of another release: remove it"):
        train(split_log(LOG, Protocol.TIME), QUICK, run, Recorder())


def test_a_loss_that_is_not_finite_ends_the_run_with_advice(tmp_path: Path) -> None:
    with pytest.raises(RelayError, match="--learning-rate"):
        trained(tmp_path / "run", options=replace(QUICK, learning_rate=1e30))


@pytest.mark.parametrize("protocol", Protocol)
def test_other_test_behaviours_change_nothing_but_the_metrics_of_the_test(tmp_path: Path, protocol: Protocol) -> None:
    """Leaks: the vocabulary, counts, negatives, histories or the choice of an epoch from the test part."""
    options = replace(QUICK, epochs=1, protocol=protocol)
    split = split_log(LOG, protocol)
    items = np.where(np.arange(len(LOG.items)) % 2, 10**6, LOG.items.min())
    changed = with_test_behaviours(LOG, split, items)
    trained(tmp_path / "as-it-is", options=options, with_baselines=True)
    trained(tmp_path / "changed", log=changed, options=options, with_baselines=True)
    found = [Run(tmp_path / name) for name in ("as-it-is", "changed")]
    assert revision_of(found[0]) == revision_of(found[1])
    one, other = (run.read_json("metrics.json") for run in found)
    for part in ("baselines", "best"):
        assert one[part] == other[part]
    assert [epoch["ndcg"] for epoch in one["epochs"]] == [epoch["ndcg"] for epoch in other["epochs"]]
    for name in (CASCADE, RETRIEVAL, RANKER, "popularity", "ials", "item-neighbours"):
        tops = [
            [json.loads(line)["top"] for line in (run.folder / "predictions" / f"{name}.jsonl").open()] for run in found
        ]
        assert tops[0] == tops[1], f"histories of {name} have test behaviours"
    assert one["test"]["ranker"] != other["test"]["ranker"]
    card = (found[0].checkpoint / "README.md").read_text()
    assert (f"and test from {split_at(split)} UTC" in card) == (protocol is Protocol.GLOBAL_TIME)


def split_at(split: Split) -> str:
    """When the test begins, as the card has it."""
    at_ms = split.cuts_ms[1] if split.cuts_ms else 0
    return datetime.datetime.fromtimestamp(at_ms // 1000, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S")


def test_negatives_are_never_the_next_behaviour(run: Run) -> None:
    split, checkpoint = split_log(LOG, Protocol.TIME), load_checkpoint(run.checkpoint)
    for _, drawn in candidate_batches(split, 0, 0, places=8, negatives=31, max_history=64):
        for batch in (drawn, with_found_negatives(checkpoint.config, dict(checkpoint.tensors), drawn)):
            wanted, others = batch.inputs.candidates[..., :1], batch.inputs.candidates[..., 1:]
            assert bool((batch.is_excluded[..., 1:] | (others != wanted)).all())
            assert not bool(batch.is_excluded[..., 0].any())


def test_half_of_the_negatives_are_what_retrieval_finds_there_and_nothing_that_the_user_had(run: Run) -> None:
    items = np.concatenate([np.random.default_rng(user).permutation(600)[:40] for user in range(20)])
    split = split_log(log_of([40] * 20, items.tolist()), Protocol.TIME)
    assert split.leaves_out_seen and split.num_items > 3 * FOUND
    config = ranker_config(split, Size(dim=16, heads=1, layers=2, max_history=64))
    tensors = initial_tensors(config, 0)
    for _, drawn in candidate_batches(split, 0, 0, places=4, negatives=20, max_history=64):
        batch = with_found_negatives(config, tensors, drawn)
        assert torch.equal(batch.inputs.candidates[..., 11:], drawn.inputs.candidates[..., 11:])
        for user, place in batch.is_target.nonzero().tolist():
            count = int(batch.inputs.places[user, place])
            codes = batch.inputs.actions[user, :count].numpy().astype(np.uint16)
            row = search_row(config, tensors, batch.inputs.items[user, :count].numpy().astype(np.int32), codes)
            scores = cosines(row, tensors["items.weight"][: split.num_items])
            scores[batch.never[user]] = -2.0
            best = set(torch.topk(scores, FOUND).indices.tolist())
            assert set(batch.inputs.candidates[user, place, 1:11].tolist()) <= best
            assert not set(batch.never[user].tolist()) & best


def test_of_a_large_vocabulary_a_sample_is_searched_for_negatives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "MOST_ITEMS", 500)
    monkeypatch.setattr(sampling, "SAMPLED", 200)
    items = [*range(600), *np.random.default_rng(0).permutation(600)[:40].tolist()]
    split = split_log(log_of([600, 40], items), Protocol.LEAVE_ONE_OUT)
    config = ranker_config(split, Size(dim=16, heads=1, layers=2, max_history=64))
    for _, drawn in candidate_batches(split, 0, 0, places=4, negatives=100, max_history=64):
        batch = with_found_negatives(config, initial_tensors(config, 0), drawn)
        assert int(batch.inputs.candidates.min()) >= 0 and int(batch.inputs.candidates.max()) < split.num_items


def each_its_own() -> Split:
    """Each behaviour has an item of its own, which says where it stands."""
    log = cyclic_log(users=30)
    return split_log(replace(log, items=np.arange(len(log.items), dtype=np.int64)), Protocol.TIME)


def test_windows_hold_training_behaviours_only_and_targets_come_after_their_history() -> None:
    """Each target is the behaviour right after its place in the window."""
    split = each_its_own()
    for _, batch in candidate_batches(split, 0, 0, places=8, negatives=3, max_history=16):
        items, places, targets = batch.inputs.items, batch.inputs.places, batch.inputs.candidates[..., 0]
        assert items.shape[1] <= 16
        for user, place in batch.is_target.nonzero().tolist():
            target = int(targets[user, place])
            before = items[user, : int(places[user, place])]
            known = before[before < split.num_items]
            assert bool((known < target).all()) and (not known.numel() or target - int(known.max()) <= 3)
            assert target < split.num_items


def test_every_behaviour_but_the_first_of_a_window_is_searched_once_an_epoch() -> None:
    split = each_its_own()
    searched: list[int] = []
    for _, batch in sequence_batches(split, 0, 0, max_history=64):
        assert torch.equal(batch.inputs.places[0], 1 + torch.arange(batch.inputs.items.shape[1]))
        for items, wanted in zip(batch.inputs.items, batch.wanted, strict=True):
            searched += wanted[wanted < split.num_items].tolist()
            known = items < split.num_items
            assert bool((wanted[known] == items[known] + 1).all()), "it came right after"
        assert torch.equal(batch.inputs.candidates[..., 1], batch.wanted), "of which `liked` is asked"
        is_known = batch.wanted < split.num_items
        liked = torch.from_numpy(split.liked[split.item_ids[batch.wanted[is_known].numpy()]])
        assert torch.equal(batch.liked[is_known], liked.float()) and not bool(batch.liked[~is_known].any())
    assert sorted(searched) == [
        row for user, start in enumerate(split.starts[:-1]) for row in split.rows[start + 1 : split.train_ends[user]]
    ]


def test_what_is_served_is_what_retrieval_finds_in_the_order_of_the_ranker(run: Run) -> None:
    checkpoint, split = load_checkpoint(run.checkpoint), split_log(LOG, Protocol.TIME)
    models = [kind(split, checkpoint.config, dict(checkpoint.tensors)) for kind in (RetrievalModel, RankerModel)]
    rows = torch.arange(split.num_items)
    found, ranked = (model.next_scores(0, Part.TEST, rows) for model in models)
    served = CascadeModel(*models, found=10).next_scores(0, Part.TEST, rows)
    best = torch.topk(found, 10).indices
    assert torch.topk(served, 10).indices.tolist() == best[ranked[best].argsort(descending=True)].tolist()
    others = torch.topk(found, len(rows)).indices[10:]
    assert served.argsort(descending=True, stable=True)[10:].tolist() == others.tolist()


def test_a_log_without_ratings_has_one_task(tmp_path: Path) -> None:
    finished = trained(tmp_path / "run", log=cyclic_log(rated=False), options=replace(QUICK, epochs=1))
    config = load_checkpoint(tmp_path / "run" / "checkpoint").config
    assert [task.name for task in config.tasks] == ["next"] and config.num_actions == 0
    assert set(finished.test["ranker"]) == {"ndcg@10", "hr@10"}


def test_a_ranker_that_is_served_all_of_a_history_scores_as_without_a_limit(run: Run) -> None:
    checkpoint, split = load_checkpoint(run.checkpoint), split_log(LOG, Protocol.TIME)
    every = torch.arange(split.num_items)
    whole, limited = (RankerModel(split, checkpoint.config, dict(checkpoint.tensors), most) for most in (0, 64))
    assert torch.equal(whole.next_scores(0, Part.TEST, every), limited.next_scores(0, Part.TEST, every))
    short = RankerModel(split, checkpoint.config, dict(checkpoint.tensors), 4)
    assert not torch.equal(whole.next_scores(0, Part.TEST, every), short.next_scores(0, Part.TEST, every))


def test_a_user_who_has_seen_every_item_is_judged_too(tmp_path: Path) -> None:
    """No candidate is left, so nothing is found."""
    items = [*range(12), 0, *range(11, -1, -1), 11]
    finished = trained(tmp_path / "run", log=log_of([13, 13], items), options=replace(QUICK, epochs=1))
    assert finished.split["items"] == 12 and finished.split["leaves_out_seen"]
    assert finished.test["ranker"][NDCG].mean == finished.test["popularity"][NDCG].mean == 0.0


def test_what_is_not_a_number_is_null_in_json(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.write_json("found.json", {"points": [{"mean": math.nan, "low": -math.inf, "users": 1}]})
    assert run.read_json("found.json") == {"points": [{"mean": None, "low": None, "users": 1}]}


def test_the_time_limit_counts_the_time_before_a_restart(tmp_path: Path) -> None:
    """The same command trained on, and changed a finished checkpoint."""
    run, options = Run(tmp_path / "run"), replace(QUICK, max_minutes=1e-9)

    def killed(name: str, steps: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_ranker(LOG, [], options, run, Progress(Recorder(), killed, lambda: None), with_baselines=False)
    later = Recorder()
    trained(run.folder, options=options, recorder=later)
    assert later.epochs == []


def test_a_time_limit_ends_training_inside_an_epoch(tmp_path: Path) -> None:
    finished = trained(tmp_path / "run", options=replace(QUICK, epochs=30, max_minutes=1e-9))
    assert finished.best == {Stage.SEQUENCE: 0, Stage.CANDIDATES: 0}
    epochs = json.loads((tmp_path / "run" / "metrics.json").read_text())["epochs"]
    trained(tmp_path / "whole", options=replace(QUICK, epochs=1))
    assert [each["stage"] for each in epochs] == list(Stage), "each stage has its share of the time"
    one_batch = epochs[0]["loss"]
    assert one_batch != json.loads((tmp_path / "whole" / "metrics.json").read_text())["epochs"][0]["loss"]


def test_the_learning_rate_falls_with_the_epochs_or_with_the_time() -> None:
    options = replace(QUICK, epochs=11, candidate_epochs=6, learning_rate=1.0)

    def rate(epoch: int, step: int, used_share: float, stage: Stage = Stage.SEQUENCE) -> float:
        return learning_rate(options, stage, epoch, step, used_share)

    assert rate(0, 49, 0.0) == rate(0, 49, 0.0, Stage.CANDIDATES) == 0.5, "it rises first"
    assert rate(5, 0, 0.0) == pytest.approx(0.525)
    assert rate(5, 0, 0.9) == rate(9, 0, 0.0) == pytest.approx(0.145)
    assert rate(10, 0, 0.0) == rate(1, 0, 3.0) == rate(5, 0, 0.0, Stage.CANDIDATES) == pytest.approx(0.05)
