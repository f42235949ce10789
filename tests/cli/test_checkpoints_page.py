"""docs/checkpoints.md runs from top to bottom: its snippets record requests, its commands convert and compare."""

from __future__ import annotations

import itertools
import json
import re
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from relaygr.cli.app import app
from relaygr.schemas.messages import Behaviours
from relaygr.worker.device import set_threads
from tests.upstream.shared import PAGE, page_names
from tests.worlds.converted import make_nvidia

UPSTREAM = Path(__file__).parents[1] / "upstream" / "meta"
"""A checkpoint that Meta's code wrote, and requests that the page's snippet recorded."""
BLOCK = re.compile(r"^```(\w+) ?(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_threads(1)
    monkeypatch.chdir(tmp_path)


def commands() -> Iterator[list[str]]:
    for language, _, text in BLOCK.findall(PAGE.read_text(encoding="utf-8")):
        if language == "bash":
            for line in text.replace("\\\n", " ").splitlines():
                assert line.startswith("relaygr ")
                yield shlex.split(line)[1:]


@dataclass(frozen=True)
class Jagged:
    """As torchrec's JaggedTensor gives the rows of each user."""

    rows: list[torch.Tensor]

    def to_dense(self) -> list[torch.Tensor]:
        return self.rows


@dataclass(frozen=True)
class Keyed:
    """As torchrec's KeyedJaggedTensor gives its features."""

    found: dict[str, list[torch.Tensor]]

    @classmethod
    def of(cls, columns: dict[str, list[list[int]]]) -> Keyed:
        return cls({name: [torch.tensor(row) for row in rows] for name, rows in columns.items()})

    def to_dict(self) -> dict[str, Jagged]:
        return {name: Jagged(rows) for name, rows in self.found.items()}


@dataclass(frozen=True)
class Sample:
    """A batch of Meta's data loader."""

    uih_features_kjt: Keyed
    candidates_features_kjt: Keyed


class Stored:
    """A model of the training job that gives predictions computed before, one batch after the other."""

    def __init__(self, predictions: list[torch.Tensor]) -> None:
        self._predictions = iter(predictions)

    def eval(self) -> Stored:
        return self

    def __call__(self, *_batch: Any) -> Any:
        return None, None, {}, next(self._predictions), None, None


def meta_job(recorded: Path) -> tuple[Stored, list[Sample]]:
    """The training job whose requests and predictions were recorded."""
    rows = [json.loads(line) for line in recorded.read_text().splitlines()]
    predictions, samples = [], []
    for _, group in itertools.groupby(rows, key=lambda row: row["batch"]):
        batch = list(group)
        history = {
            "movie_id": [row["items"] for row in batch],
            "item_weights": [row["actions"] for row in batch],
            "action_timestamp": [[time // 1000 for time in row["timestamps_ms"]] for row in batch],
            **{name: [row["features"][name] for row in batch] for name in ("user_id", "region")},
        }
        asked = {
            "item_movie_id": [row["candidates"] for row in batch],
            "item_query_time": [[row["query_time_ms"] // 1000] * len(row["candidates"]) for row in batch],
        }
        samples.append(Sample(Keyed.of(history), Keyed.of(asked)))
        predictions.append(torch.cat([torch.tensor(list(row["scores"].values())) for row in batch], dim=1))
    return Stored(predictions), samples


@pytest.mark.slow
def test_the_page_leads_to_scores_that_agree() -> None:
    shutil.copytree(UPSTREAM / "150", "dlrm")
    model, loader = meta_job(UPSTREAM / "requests.jsonl")
    names = page_names()
    names["record_meta"](model, loader, "requests.jsonl", ["user_id", "region"], ["click", "watch"])
    assert Path("requests.jsonl").read_text() == (UPSTREAM / "requests.jsonl").read_text()
    output = ""
    for command in commands():
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 0, done.output
        output += done.output
    assert "The scores agree." in output
    assert "not in the model's vocabulary" not in output


@dataclass
class Ranking:
    """NVIDIA's model and its data loader: histories end with the candidates, and scores are logits."""

    histories: list[Behaviours]
    candidates: list[np.ndarray]
    features: Keyed = field(init=False)
    item_feature_name = "video_id"
    action_feature_name = "action_type"

    def __post_init__(self) -> None:
        pairs = list(zip(self.histories, self.candidates, strict=True))
        self.num_candidates = torch.tensor([asked.size for asked in self.candidates])
        self.features = Keyed(
            {
                "video_id": [torch.as_tensor(np.concatenate((own.items, asked))) for own, asked in pairs],
                "action_type": [
                    torch.as_tensor(np.pad(own.actions, (0, asked.size)).astype(int)) for own, asked in pairs
                ],
                "region": [torch.tensor([number % 3]) for number in range(len(pairs))],
            }
        )

    def eval(self) -> Ranking:
        return self

    def get_logit_and_labels(self, batch: Ranking) -> tuple[torch.Tensor, None, None]:
        source = make_nvidia()
        scores = [
            source.scores([number % 3], own, asked)
            for number, (own, asked) in enumerate(zip(self.histories, self.candidates, strict=True))
        ]
        return torch.logit(torch.as_tensor(np.concatenate(scores))), None, None


@pytest.mark.slow
def test_the_snippet_for_nvidia_records_requests_that_agree() -> None:
    random = np.random.default_rng(0)
    histories = [
        Behaviours(random.integers(0, 20, count), random.integers(0, 4, count).astype(np.uint16), np.arange(count))
        for count in (11, 0, 6)
    ]
    job = Ranking(histories, [random.integers(0, 20, count) for count in (3, 2, 12)])
    source = make_nvidia()
    tables = {"item": "items", "action": "actions", "region": "region"}
    state = {f"embeddings.{name}.weight": torch.from_numpy(source.weights[ours]) for name, ours in tables.items()}
    torch.save(source.state_dict("fused") | state, "model.0.pth")
    names = page_names()
    names["record_nvidia"](job, [job], "requests.jsonl", ["region"], ["click", "like"])
    convert = "model convert model.0.pth out --from nvidia --heads 2 --normalizer 40 --feature region"
    rest = "--no-contextual-mask --task click --task like"
    for command in (f"{convert} {rest}", "model compare out --requests requests.jsonl"):
        done = CliRunner().invoke(app, command.split())
        assert done.exit_code == 0, done.output
    assert "The scores agree." in done.output


def test_the_snippet_for_the_research_model_records_requests() -> None:
    row = {
        "history_lengths": torch.tensor([2, 0]),
        "historical_ids": torch.tensor([[5, 7, 0], [0, 0, 0]]),
        "historical_timestamps": torch.tensor([[10, 20, 0], [0, 0, 0]]),
        "target_timestamps": torch.tensor([30, 40]),
    }
    names = page_names()
    scores = torch.arange(6.0).view(2, 3, 1)
    names["record_research"](lambda _row, _candidates: scores, [row], "r.jsonl", torch.tensor([1, 2, 3]), ["click"])
    first, second = map(names["json"].loads, Path("r.jsonl").read_text().splitlines())
    assert first == {
        "items": [5, 7],
        "actions": [0, 0],
        "timestamps_ms": [10_000, 20_000],
        "query_time_ms": 30_000,
        "features": {},
        "candidates": [1, 2, 3],
        "scores": {"click": [0.0, 1.0, 2.0]},
        "batch": 0,
    }
    assert (second["items"], second["scores"]) == ([], {"click": [3.0, 4.0, 5.0]})
