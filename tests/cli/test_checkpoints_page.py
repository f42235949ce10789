"""docs/checkpoints.md runs from top to bottom: its snippets record requests, its commands convert and compare."""

from __future__ import annotations

import json
import os
import re
import shlex
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
from tests.workers.vector_models import make_dlrm
from tests.worlds.converted import dlrm_state_dict, make_nvidia
from tests.worlds.vectors import Made

PAGE = Path(__file__).parents[2] / "docs" / "checkpoints.md"
BLOCK = re.compile(r"^```(\w+) ?(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_threads(1)
    monkeypatch.chdir(tmp_path)


def snippets() -> dict[str, str]:
    return {name: text for language, name, text in BLOCK.findall(PAGE.read_text(encoding="utf-8")) if name}


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

    def to_dict(self) -> dict[str, Jagged]:
        return {name: Jagged(rows) for name, rows in self.found.items()}


@dataclass(frozen=True)
class Sample:
    """A batch of Meta's data loader."""

    uih_features_kjt: Keyed
    candidates_features_kjt: Keyed


@dataclass(frozen=True)
class Stored:
    """A model of the training job that gives predictions computed before."""

    predictions: Any

    def eval(self) -> Stored:
        return self

    def __call__(self, *_batch: Any) -> Any:
        return None, None, {}, self.predictions, None, None


def meta_job(made: Made) -> tuple[Stored, list[Sample]]:
    """The training job of a case: each row of the case's embeddings is an item or a user of its own."""
    options, arrays = made
    lengths, counts = arrays["uih_lengths"].tolist(), arrays["num_candidates"].tolist()
    total, users = sum(lengths), len(lengths)

    def split(values: Any, sizes: list[int]) -> list[torch.Tensor]:
        return list(torch.as_tensor(np.asarray(values, np.int64)).split(sizes))

    history = {
        "movie_id": split(np.arange(total), lengths),
        "item_weights": split(arrays["payload/action"], lengths),
        "action_timestamp": split(arrays["payload/time"], lengths),
        **{name: split(np.arange(users), [1] * users) for name in options["contextual"]},
    }
    asked = {
        "item_movie_id": split(total + np.arange(sum(counts)), counts),
        "item_query_time": split(arrays["payload/c_time"], counts),
    }
    preds = torch.as_tensor(np.asarray(arrays["preds"], np.float32))
    return Stored(preds), [Sample(Keyed(history), Keyed(asked))]


def upstream() -> Made:
    """The first whole model of the vectors that the source's own code computed."""
    file = np.load(os.environ["RELAYGR_TEST_VECTORS"], allow_pickle=False)
    cases = json.loads(str(file["meta.json"]))
    name = min(name for name in cases if name.startswith("dlrm_"))
    return cases[name], {key.removeprefix(f"{name}/"): file[key] for key in file.files if key.startswith(f"{name}/")}


needs_vectors = pytest.mark.skipif("RELAYGR_TEST_VECTORS" not in os.environ, reason="RELAYGR_TEST_VECTORS: no file")


@pytest.mark.slow
@pytest.mark.parametrize("source", ["numpy", pytest.param("upstream", marks=needs_vectors)])
def test_the_page_leads_to_scores_that_agree(source: str) -> None:
    made = make_dlrm() if source == "numpy" else upstream()
    options = made[0]
    tasks = [text.split(":")[0] for text in options["tasks"]] if source == "upstream" else ["click", "watch"]
    state = dlrm_state_dict(made)
    items = state.pop("_embedding_collection.embeddings.item.weight")
    Path("dlrm").mkdir()
    torch.save({"dense_dict": state | {"_embedding_collection.embeddings.movie_id.weight": items}}, "dlrm/model.pt")
    model, loader = meta_job(made)
    names: dict[str, Any] = {}
    exec(snippets()["record"] + snippets()["meta"], names)
    names["record_meta"](model, loader, "requests.jsonl", options["contextual"], tasks)
    output = ""
    for command in commands():
        words = [options["N"] if before == "--normalizer" else word for before, word in zip(["", *command], command)]  # noqa: B905
        if source == "upstream" and "--task" in words:
            words[words.index("--task") : -2] = [word for task in tasks[:-1] for word in ("--task", task)]
        done = CliRunner().invoke(app, [str(word) for word in words])
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
    names: dict[str, Any] = {}
    exec(snippets()["record"] + snippets()["nvidia"], names)
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
    names: dict[str, Any] = {}
    exec(snippets()["record"] + snippets()["research"], names)
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
