"""`relaygr model compare`: scores that agree pass; scores that differ are shown, with the page of the usual causes."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from relaygr.cli.app import app
from relaygr.compare.measures import agreement
from relaygr.compare.requests import Request, read_requests
from relaygr.compare.running import Scorer
from relaygr.runtime.errors import RelayError
from relaygr.schemas.messages import Behaviours
from relaygr.worker.device import CpuDevice, set_threads
from relaygr.worker.model.checkpoint import Checkpoint, compute_revision, save_checkpoint
from relaygr.worker.model.config import ModelConfig
from relaygr.worker.model.convert.conversion import convert_state_dict
from relaygr.worker.model.convert.options import ConvertOptions, ProjectionLayout, SourceFeature, SourceKind
from relaygr.worker.model.convert.state_dict import StateDict
from relaygr.worker.model.options import ReadoutActivation, Task, TaskKind
from tests.promised import program
from tests.workers.vector_models import make_dlrm
from tests.worlds.converted import Tensors, dlrm_state_dict, make_nvidia

HISTORIES = (0, 3, 6, 9, 14, 20, 26, 32)
CANDIDATES = 13
"""More than the best ten."""
PAGE = Path(__file__).parents[2] / "docs" / "differing-scores.md"


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """The models are so small that threads would only wait for each other."""
    set_threads(1)


def meta_source() -> Tensors:
    return dlrm_state_dict(make_dlrm())


def meta_options(**changes: Any) -> ConvertOptions:
    values: dict[str, Any] = {
        "heads": 2,
        "normalizer": 40,
        "tasks": (Task(name="click"), Task(name="watch", kind=TaskKind.REGRESSION)),
        "features": (SourceFeature(name="user_id", min_tokens=18), SourceFeature(name="region", min_tokens=0)),
        "max_prefix": 32,
    }
    return ConvertOptions(**(values | changes))


def nvidia_source(layout: str) -> Tensors:
    import torch

    source = make_nvidia()
    tables = {"item": "items", "action": "actions", "region": "region"}
    found = {f"_embedding_collection.embeddings.{a}.weight": source.weights[b] for a, b in tables.items()}
    return source.state_dict(layout) | {name: torch.from_numpy(table) for name, table in found.items()}


def nvidia_options(**changes: Any) -> ConvertOptions:
    values: dict[str, Any] = {
        "heads": 2,
        "normalizer": 40,
        "tasks": (Task(name="click"), Task(name="like")),
        "features": (SourceFeature(name="region"),),
        "contextual_mask": False,
        "max_prefix": 32,
    }
    return ConvertOptions(**(values | changes))


def converted(source: Tensors, kind: SourceKind, options: ConvertOptions) -> Checkpoint:
    made = convert_state_dict(StateDict(source), kind, options, "here")
    assert made.report.is_complete, made.report
    return Checkpoint(made.config, made.tensors, compute_revision(made.config, made.tensors))


def asked(config: ModelConfig, histories: Sequence[int] = HISTORIES) -> list[Request]:
    """Requests with histories of these lengths; the scores are still zeros."""
    random = np.random.default_rng(0)
    requests = []
    for length in histories:
        times = 1_600_000_000_000 + np.sort(random.integers(0, 600, length)) * 1000
        behaviours = Behaviours(
            random.integers(0, config.vocabulary_size, length), random.integers(0, 4, length).astype(np.uint16), times
        )
        features = [random.integers(0, feature.cardinality) for feature in config.contextual_features]
        requests.append(
            Request(
                behaviours,
                np.array(features, np.int64),
                random.choice(config.vocabulary_size, CANDIDATES, replace=False),
                1_600_000_660_000,
                np.zeros((CANDIDATES, len(config.tasks))),
            )
        )
    return requests


def scored(checkpoint: Checkpoint, requests: Sequence[Request]) -> list[Request]:
    """With the scores that this model gives."""
    scores = Scorer(checkpoint, CpuDevice(), requests).full(requests).scores
    return [replace(request, scores=own) for request, own in zip(requests, scores, strict=True)]


def lines_of(requests: Sequence[Request], config: ModelConfig) -> list[dict[str, Any]]:
    names = [feature.name for feature in config.contextual_features]
    return [
        {
            "items": request.behaviours.items.tolist(),
            "actions": request.behaviours.actions.tolist(),
            "timestamps_ms": request.behaviours.timestamps_ms.tolist(),
            "query_time_ms": request.query_time_ms,
            "features": dict(zip(names, request.features.tolist(), strict=True)),
            "candidates": request.candidates.tolist(),
            "scores": {task.name: request.scores[:, k].tolist() for k, task in enumerate(config.tasks)},
            "batch": number // 3,
        }
        for number, request in enumerate(requests)
    ]


def write(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(folder: Path, checkpoint: Checkpoint, requests: Path, *arguments: object) -> Result:
    save_checkpoint(folder / "model", checkpoint.config, checkpoint.tensors)
    command = ["model", "compare", str(folder / "model"), "--requests", str(requests), "--device", "cpu"]
    return CliRunner().invoke(app, [*command, *map(str, arguments)])


def compared(folder: Path, right: Checkpoint, wrong: Checkpoint) -> Result:
    """A file with the scores of one model, compared with another."""
    requests = scored(right, asked(right.config))
    return run(folder, wrong, write(folder / "requests.jsonl", lines_of(requests, right.config)))


def test_the_same_model_agrees(tmp_path: Path) -> None:
    model = converted(meta_source(), SourceKind.META, meta_options())
    done = compared(tmp_path, model, model)
    assert done.exit_code == 0, done.output
    assert "The scores agree." in done.output
    assert "1.0000" in done.output and "100.0%" in done.output


def nvidia(layout: str, **changes: Any) -> Checkpoint:
    return converted(nvidia_source(layout), SourceKind.NVIDIA, nvidia_options(**changes))


def assert_differs(done: Result) -> None:
    assert done.exit_code == 1
    assert "docs/differing-scores.md has the usual causes" in " ".join(done.output.split()), done.output


@pytest.mark.parametrize(
    "wrong",
    [
        {"heads": 1},
        {"normalizer": 64},
        {"normalizer": 16384},
        {"features": (SourceFeature(name="user_id", min_tokens=0), SourceFeature(name="region"))},
        {"features": (SourceFeature(name="region", min_tokens=0), SourceFeature(name="user_id", min_tokens=18))},
        {"tables": {"user_id": "region", "region": "user_id"}},
        {"tasks": (Task(name="click"), Task(name="watch"))},
    ],
)
def test_a_wrong_option_shows(tmp_path: Path, wrong: dict[str, Any]) -> None:
    right = converted(meta_source(), SourceKind.META, meta_options())
    assert_differs(compared(tmp_path, right, converted(meta_source(), SourceKind.META, meta_options(**wrong))))


@pytest.mark.parametrize(
    ("layout", "wrong"),
    [
        ("fused", {"heads": 1}),
        ("native", {"heads": 1}),
        ("native", {"projection": ProjectionLayout.CONTIGUOUS}),
        ("fused", {"contextual_mask": True}),
        ("fused", {"target_group_size": 4}),
        ("fused", {"activation": ReadoutActivation.SILU}),
        ("fused", {"alpha": 1.0}),
    ],
)
def test_a_wrong_option_of_another_source_shows(tmp_path: Path, layout: str, wrong: dict[str, Any]) -> None:
    assert_differs(compared(tmp_path, nvidia(layout), nvidia(layout, **wrong)))


def test_the_request_with_the_worst_error_is_named(tmp_path: Path) -> None:
    model = converted(meta_source(), SourceKind.META, meta_options())
    rows = lines_of(scored(model, asked(model.config)), model.config)
    rows[5]["scores"]["click"][0] *= 1.001
    done = run(tmp_path, model, write(tmp_path / "requests.jsonl", rows))
    assert_differs(done)
    assert "Request 6 has the worst error" in done.output


def commands_of(block: str) -> dict[str, str]:
    """The commands of a block of the page, by the comment above each."""
    [text] = re.findall(rf"^```bash {block}\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    lines = text.splitlines()
    return {above: line for above, line in zip(["", *lines], lines, strict=False) if line[0] != "#"}


def run_jq(command: str, folder: Path) -> str:
    program("jq")
    return subprocess.run(command, shell=True, cwd=folder, check=True, capture_output=True, text=True).stdout


def shifted_actions(row: dict[str, Any]) -> None:
    row["actions"] = [action + 1 for action in row["actions"]]


def reversed_history(row: dict[str, Any]) -> None:
    for name in ("items", "actions", "timestamps_ms"):
        row[name] = row[name][::-1]


def shifted_items(row: dict[str, Any]) -> None:
    for name in ("items", "candidates"):
        row[name] = [item - 1 for item in row[name]]


def numbers_of_bits(row: dict[str, Any]) -> None:
    row["actions"] = [action.bit_length() - 1 for action in row["actions"]]


def in_seconds(row: dict[str, Any]) -> None:
    row["timestamps_ms"] = [time // 1000 for time in row["timestamps_ms"]]
    row["query_time_ms"] //= 1000


def in_microseconds(row: dict[str, Any]) -> None:
    row["timestamps_ms"] = [time * 1000 for time in row["timestamps_ms"]]
    row["query_time_ms"] *= 1000


def asked_later(row: dict[str, Any]) -> None:
    row["query_time_ms"] += 10_000_000


def exchanged_features(row: dict[str, Any]) -> None:
    row["features"] = dict(zip(row["features"], reversed(row["features"].values()), strict=True))


def exchanged_tasks(row: dict[str, Any]) -> None:
    row["scores"] = dict(zip(row["scores"], reversed(row["scores"].values()), strict=True))


def logits(row: dict[str, Any]) -> None:
    click = np.array(row["scores"]["click"])
    row["scores"]["click"] = np.log(click / (1 - click)).tolist()


SPOILED = (
    shifted_items,
    shifted_actions,
    numbers_of_bits,
    reversed_history,
    in_seconds,
    in_microseconds,
    asked_later,
    exchanged_features,
    exchanged_tasks,
    logits,
)
"""A wrong content of the file for each command of the page, in its order."""


@pytest.mark.parametrize("spoil", SPOILED, ids=lambda spoil: spoil.__name__)
def test_the_pages_command_undoes_a_wrong_content_of_the_file(
    tmp_path: Path, spoil: Callable[[dict[str, Any]], None]
) -> None:
    model = converted(meta_source(), SourceKind.META, meta_options())
    # Actions are bits, and each request is asked at its last behaviour: what each command restores.
    requests = []
    for request in asked(model.config, HISTORIES[1:]):
        own = request.behaviours
        behaviours = Behaviours(own.items, 1 << (own.actions % 3), own.timestamps_ms)
        requests.append(replace(request, behaviours=behaviours, query_time_ms=int(own.timestamps_ms[-1])))
    rows = lines_of(scored(model, requests), model.config)
    for row in rows:
        spoil(row)
    assert_differs(run(tmp_path, model, write(tmp_path / "requests.jsonl", rows)))
    commands = list(commands_of("contents").values())
    assert len(commands) == len(SPOILED)
    run_jq(commands[SPOILED.index(spoil)], tmp_path)
    done = run(tmp_path, model, tmp_path / "try.jsonl")
    assert done.exit_code == 0, done.output


def test_the_page_prints_length_and_error_of_each_request(tmp_path: Path) -> None:
    """A feature that should be hidden shows in short requests only."""
    right = converted(meta_source(), SourceKind.META, meta_options())
    shown = (SourceFeature(name="user_id", min_tokens=0), SourceFeature(name="region", min_tokens=0))
    done = run(
        tmp_path,
        converted(meta_source(), SourceKind.META, meta_options(features=shown)),
        write(tmp_path / "requests.jsonl", lines_of(scored(right, asked(right.config)), right.config)),
        "--json",
    )
    (tmp_path / "compared.json").write_text(done.stdout)
    _, command = commands_of("lengths").values()
    found = [line.split(",") for line in run_jq(command, tmp_path).splitlines()]
    assert [int(length) for length, _ in found] == [length + CANDIDATES for length in HISTORIES]
    assert [float(error) > 1e-4 for _, error in found] == [length + CANDIDATES < 18 for length in HISTORIES]


def test_small_errors_are_explained_by_rounding(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    model = converted(meta_source(), SourceKind.META, meta_options())
    requests = [
        replace(request, scores=request.scores * (1 + random.normal(size=request.scores.shape) * 1e-4))
        for request in scored(model, asked(model.config))
    ]
    done = run(tmp_path, model, write(tmp_path / "requests.jsonl", lines_of(requests, model.config)))
    assert_differs(done)
    assert "bfloat16" in done.output
    tolerant = run(tmp_path, model, tmp_path / "requests.jsonl", "--tolerance", 1e-2)
    assert tolerant.exit_code == 0


def test_an_npz_file_holds_the_same(tmp_path: Path) -> None:
    model = converted(meta_source(), SourceKind.META, meta_options())
    requests = scored(model, asked(model.config))
    behaviours = [request.behaviours for request in requests]
    asked_for = {
        "lengths": np.array([len(own) for own in behaviours]),
        "items": np.concatenate([own.items for own in behaviours]),
        "actions": np.concatenate([own.actions for own in behaviours]),
        "timestamps_ms": np.concatenate([own.timestamps_ms for own in behaviours]),
        "query_time_ms": np.array([request.query_time_ms for request in requests]),
        "features/user_id": np.array([request.features[0] for request in requests]),
        "features/region": np.array([request.features[1:] for request in requests]),
    }
    counts = np.array([request.candidates.size for request in requests])
    given = {
        f"scores/{task.name}": np.concatenate([request.scores[:, k] for request in requests])
        for k, task in enumerate(model.config.tasks)
    }
    candidates = np.concatenate([request.candidates for request in requests])
    np.savez(tmp_path / "requests.npz", **asked_for, num_candidates=counts, candidates=candidates)  # type: ignore[arg-type]
    np.savez(tmp_path / "scores.npz", **given, num_candidates=counts)  # type: ignore[arg-type]
    done = run(tmp_path, model, tmp_path / "requests.npz", "--scores", tmp_path / "scores.npz")
    assert done.exit_code == 0, done.output


def write_parquet(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pa_parquet

    pa_parquet.write_table(pa.Table.from_pylist(list(rows)), path)
    return path


def test_a_parquet_file_holds_the_same(tmp_path: Path) -> None:
    model = converted(meta_source(), SourceKind.META, meta_options())
    rows = lines_of(scored(model, asked(model.config)), model.config)
    for number, row in enumerate(rows):
        row["features"] = {name: [value] for name, value in row["features"].items()}
        if number % 2:
            row["batch"] = None
    config, lines = model.config, write(tmp_path / "requests.jsonl", rows)
    asked_for = write_parquet(tmp_path / "r.parquet", [{k: v for k, v in row.items() if k != "scores"} for row in rows])
    # The index of a pandas frame whose rows were filtered is a column.
    scores = [{"scores": row["scores"], "__index_level_0__": 2 * number} for number, row in enumerate(rows)]
    given = write_parquet(tmp_path / "s.parquet", scores)
    pairs = zip(read_requests(asked_for, given, config), read_requests(lines, lines, config), strict=True)
    for ours, theirs in pairs:
        assert ours.behaviours == theirs.behaviours
        assert ours.features.tolist() == theirs.features.tolist()
        assert ours.candidates.tolist() == theirs.candidates.tolist()
        assert ours.query_time_ms == theirs.query_time_ms
        assert (ours.scores == theirs.scores).all()
    done = run(tmp_path, model, asked_for, "--scores", given)
    assert done.exit_code == 0, done.output


def test_a_parquet_file_with_other_columns_is_refused(tmp_path: Path) -> None:
    model = converted(meta_source(), SourceKind.META, meta_options())
    rows = lines_of(asked(model.config), model.config)
    rows[0]["user"] = 7
    with pytest.raises(RelayError, match="the file has user; known are actions, batch"):
        read_requests(write_parquet(tmp_path / "r.parquet", rows), tmp_path / "r.parquet", model.config)
    del rows[0]["user"]
    del rows[1]["features"]["region"]
    with pytest.raises(RelayError, match="request 2: it has no 'region'"):
        read_requests(write_parquet(tmp_path / "r.parquet", rows), tmp_path / "r.parquet", model.config)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"candidates": []}, "request 2: it has no candidates"),
        ({"items": [1, 2]}, "request 2: actions has 3 numbers, not 2"),
        ({"items": [0.5]}, "request 2: items holds float64 [1], not one row of integers"),
        ({"actions": [70_000, 0, 0]}, "request 2: actions are codes from 0 to 65535"),
        ({"query_time_ms": None}, "request 2: query_time_ms holds"),
        ({"features": {"user_id": 1}}, "request 2: it has no 'region'"),
        ({"features": {"user_id": 1, "region": 1, "planet": 2}}, "no feature planet; it has user_id, region"),
        ({"features": {"user_id": [1, 2], "region": 1}}, "feature user_id has 2 values, the model has 1 tokens"),
        ({"scores": {"click": [0.5]}}, "request 2: [1] scores of click for 13 candidates"),
        ({"scores": {"like": [0.5]}}, "request 2: it has no score for the task click; it has like"),
        ({"user": 7}, "line 2 has user; known are actions, batch"),
    ],
)
def test_a_bad_request_is_named(tmp_path: Path, change: dict[str, Any], sentence: str) -> None:
    model = converted(meta_source(), SourceKind.META, meta_options())
    rows = lines_of(asked(model.config), model.config)
    rows[1] |= change
    with pytest.raises(RelayError) as refusal:
        read_requests(write(tmp_path / "r.jsonl", rows), tmp_path / "r.jsonl", model.config)
    assert sentence in str(refusal.value)


def test_files_that_are_no_requests_are_refused(tmp_path: Path) -> None:
    config = converted(meta_source(), SourceKind.META, meta_options()).config
    for name, content, sentence in (
        ("a.jsonl", "", "contains no request"),
        ("b.jsonl", "[1]", "line 1 is not an object"),
        ("c.jsonl", "text", "line 1 is not JSON"),
        ("d.npz", "text", "cannot be read as requests"),
        ("d.parquet", "text", "cannot be read as requests"),
        ("e.jsonl", '{"items": []}\n{"items": []}', "has 2 requests, "),
    ):
        (tmp_path / name).write_text(content)
        other = tmp_path / "a.jsonl" if name == "e.jsonl" else tmp_path / name
        with pytest.raises(RelayError, match=sentence):
            read_requests(tmp_path / name, other, config)


def test_histories_beyond_the_models_limits_are_refused(tmp_path: Path) -> None:
    model = converted(meta_source(), SourceKind.META, meta_options())
    rows = lines_of(scored(model, asked(model.config)), model.config)
    rows[3] |= {name: list(range(40)) for name in ("items", "actions", "timestamps_ms")}
    done = run(tmp_path, model, write(tmp_path / "requests.jsonl", rows))
    assert done.exit_code == 1
    text = " ".join(done.output.split())
    assert "Request 4 is too long: 40 prefix behaviours, the model takes 32. Leave it out, or make the model" in text
    assert "of a conversion, by --max-prefix" in text


def test_ids_outside_the_vocabulary_are_counted(tmp_path: Path) -> None:
    model = converted(meta_source(), SourceKind.META, meta_options())
    rows = lines_of(scored(model, asked(model.config)), model.config)
    rows[-1]["candidates"][:2] = [10**12, 10**13]
    done = run(tmp_path, model, write(tmp_path / "requests.jsonl", rows))
    assert "2 of 214 item ids are not in the model's vocabulary" in done.output, done.output


def test_features_and_codes_that_the_model_does_not_know_are_counted(tmp_path: Path) -> None:
    model = converted(meta_source(), SourceKind.META, meta_options())
    rows = lines_of(scored(model, asked(model.config)), model.config)
    rows[-1]["actions"][:2] = [2**15, 2**15 + 1]
    rows[-1]["features"] = {feature.name: [] for feature in model.config.contextual_features}
    done = run(tmp_path, model, write(tmp_path / "requests.jsonl", rows), "--json")
    found = json.loads(done.output)
    assert (found["unknown_actions"], found["unknown_features"]) == (2, model.config.contextual_tokens)


def test_rank_correlation_and_overlap_follow_their_definitions() -> None:
    theirs = [np.array([[0.1], [0.2], [0.3], [0.4]])]
    (same,) = agreement(theirs, theirs, 2)
    assert (same.worst_error, same.rank_correlation, same.topk_overlap) == (0.0, 1.0, 1.0)
    (reverse,) = agreement([-theirs[0]], theirs, 2)
    assert reverse.rank_correlation == pytest.approx(-1.0)
    assert reverse.topk_overlap == 0.0
    (one,) = agreement([np.array([[0.1], [0.3], [0.2], [0.4]])], theirs, 2)
    # Spearman's: 1 - 6 * (1 + 1) / (4 * 15).
    assert one.rank_correlation == pytest.approx(0.8)
    assert one.topk_overlap == 0.5
    assert one.worst_error == pytest.approx(0.25)
    (few,) = agreement([np.array([[np.nan]])], [np.array([[0.5]])], 2)
    assert (few.worst_error, few.rank_correlation, few.topk_overlap) == (np.inf, None, None)
