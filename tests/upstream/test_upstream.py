"""Checkpoints that the code of each source wrote give its scores: README.md of this folder says how they were made."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from relaygr.cli.app import app
from relaygr.worker.device import set_threads

HERE = Path(__file__).parent
LARGEST_ERROR = 1e-6
"""A share of the largest score of a task."""


@dataclass(frozen=True)
class Source:
    """A checkpoint, the options that are right for it, and a wrong one that no tensor refutes."""

    name: str
    path: str
    options: str
    right: str
    wrong: str

    def __str__(self) -> str:
        return self.name


SOURCES = (
    Source(
        "meta",
        "meta/150",
        "--heads 2 --normalizer 40 --table item=movie_id --feature user_id --feature region --hide-below user_id=4 "
        "--task click --task watch:regression",
        right="user_id=4",
        wrong="user_id=1",
    ),
    Source(
        "research",
        "research",
        "--heads 2 --normalizer 30 --task click",
        right="--heads 2",
        wrong="--heads 1",
    ),
    Source(
        "nvidia",
        "nvidia",
        "--heads 2 --normalizer 96 --table item=video_id --table action=action_type --feature region --feature device "
        "--contextual-mask --task click --task like",
        right="--contextual-mask",
        wrong="--no-contextual-mask",
    ),
    Source(
        "torcheasyrec",
        "torcheasyrec/model.ckpt-10",
        "--item-feature cand_seq__item_video_cat --item-values cand_seq__item_video_cat=torcheasyrec/categories.npy",
        right="torcheasyrec/categories.npy",
        wrong="{out}/shifted.npy",
    ),
)


@pytest.fixture(autouse=True)
def in_this_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    set_threads(1)
    monkeypatch.chdir(HERE)


def run(command: str) -> Result:
    return CliRunner().invoke(app, shlex.split(command))


def compared(source: Source, options: str, requests: Path, out: Path) -> dict[str, Any]:
    """Converts with these options, and compares."""
    done = run(f"model convert {source.path} {out}/model --force --from {source.name} {options}")
    assert done.exit_code == 0, done.output
    assert "0 left over, 0 missing" in " ".join(done.output.split())
    done = run(f"model compare {out}/model --requests {requests} --tolerance {LARGEST_ERROR} --json")
    found: dict[str, Any] = json.loads(done.stdout)
    assert done.exit_code == (not found["agrees"])
    return found


def worst_error(found: dict[str, Any]) -> float:
    return max(task["worst_error"] for task in found["tasks"].values())


@pytest.mark.slow
@pytest.mark.parametrize("source", SOURCES, ids=str)
def test_the_scores_are_those_of_the_source(source: Source, tmp_path: Path) -> None:
    """With the whole history computed at once, and with cached keys and values."""
    found = compared(source, source.options, Path(source.name, "requests.jsonl"), tmp_path)
    assert found["agrees"], found
    assert (found["requests"], found["unknown_items"]) == (24, 0)


@pytest.mark.slow
@pytest.mark.parametrize("source", SOURCES, ids=str)
def test_a_wrong_option_shows(source: Source, tmp_path: Path) -> None:
    np.save(tmp_path / "shifted.npy", np.roll(np.load("torcheasyrec/categories.npy"), 1))
    assert source.options.count(source.right) == 1
    options = source.options.replace(source.right, source.wrong.format(out=tmp_path))
    found = compared(source, options, Path(source.name, "requests.jsonl"), tmp_path)
    assert not found["agrees"]
    assert worst_error(found) > 1e-3


@pytest.mark.slow
def test_metas_scores_need_the_n_of_their_batch(tmp_path: Path) -> None:
    meta = SOURCES[0]
    batches: dict[int, list[dict[str, Any]]] = {}
    for line in Path("meta/varying.jsonl").read_text().splitlines():
        request = json.loads(line)
        batches.setdefault(request["batch"], []).append(request)
    normalizers = set()
    for requests in batches.values():
        histories, candidates = ([len(request[name]) for request in requests] for name in ("items", "candidates"))
        normalizer = 2 + max(histories) + max(candidates)
        normalizers.add(normalizer)
        file = tmp_path / "batch.jsonl"
        file.write_text("".join(json.dumps(request) + "\n" for request in requests))
        options = meta.options.replace("--normalizer 40", f"--normalizer {normalizer}")
        assert compared(meta, options, file, tmp_path)["agrees"], normalizer
    assert len(normalizers) > 3
    found = compared(meta, meta.options, Path("meta/varying.jsonl"), tmp_path)
    assert worst_error(found) > 1e-4
