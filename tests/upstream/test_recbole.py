"""SASRec as RecBole trains it gives RecBole's scores: README.md of this folder says how they were recorded."""

from __future__ import annotations

import json
import os
import shutil
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from relaygr.cli.app import app
from relaygr.ingest.recbole import item_numbers, items_of_log
from relaygr.runtime.errors import RelayError
from relaygr.schemas.digest import digest_chain
from relaygr.schemas.messages import Behaviours, History
from relaygr.worker.history.resolve import window
from relaygr.worker.kv import KvDtype
from relaygr.worker.measuring import bind_own_arena
from relaygr.worker.model.config import PrefixRules
from relaygr.worker.model.convert.recbole import RecBoleConfig, read_sasrec
from relaygr.worker.model.engine import engine_to_check, load_engine
from relaygr.worker.model.inference import FullRequest, full_inference
from relaygr.worker.model.interface import Engine, TooLongError
from relaygr.worker.model.ranker_engine import RankerEngine
from relaygr.worker.model.rankers import write_record
from relaygr.worker.model_check import ModelCheck, rules_found
from relaygr.worker.score_error import made_sample
from tests.waiting import outcome

HERE = Path(__file__).parent / "recbole"
MODULE = "relaygr.ranker.sasrec"
RECORDED = json.loads((HERE / "recorded.json").read_text())
CASES = RECORDED["cases"]
NUMBERED = RECORDED["numbered"]
LONGEST, WIDTH = 20, 16
TRAINED = next(each for each in NUMBERED if len(each["items"]) == len(CASES[0]["scores"]))
IDS = item_numbers(TRAINED["items"][1:])
UNKNOWN = 4_000_000_000
NO_FEATURES = np.empty(0, np.int64)


def convert(*arguments: object, code: int = 0) -> str:
    done = CliRunner().invoke(app, ["model", "convert-recbole", *map(str, arguments)], env={"COLUMNS": "400"})
    assert done.exit_code == code, done.output
    return " ".join(done.output.split())


def converted(folder: Path, max_suffix: int = 4) -> Path:
    """The folder, with the record that `model check` would write."""
    log = HERE / "recbole.inter"
    convert(HERE / "sasrec.pth", folder, "--log", log, "--max-suffix", max_suffix, "--max-candidates", 100)
    engine = engine_to_check(folder, "cpu", [MODULE])
    assert isinstance(engine, RankerEngine) and engine.record is not None
    write_record(folder, replace(engine.record, rules=PrefixRules()))
    return folder


def opened(folder: Path, dtype: KvDtype = KvDtype.FLOAT32) -> Engine:
    engine = load_engine(folder, "cpu", dtype, 16, ranker_modules=[MODULE])
    bind_own_arena(engine)
    return engine


def behaviours(names: list[str]) -> Behaviours:
    items = item_numbers_of(names)
    return Behaviours(items, np.zeros(items.size, np.uint16), np.arange(items.size, dtype=np.int64))


def item_numbers_of(names: list[str]) -> np.ndarray:
    number = dict(zip(TRAINED["items"][1:], IDS.tolist(), strict=True))
    return np.array([number[name] for name in names], np.int64)


def scores(engine: Engine, history: Behaviours, suffix: int = 0, chunk: int | None = None) -> np.ndarray:
    """Of RecBole's items, from padding on."""
    cut = len(history) - suffix
    candidates = np.concatenate(([UNKNOWN], IDS))
    asked = FullRequest(NO_FEATURES, history[:cut], candidates, 0, history[cut:])
    return full_inference(engine, asked, np.arange(2, dtype=np.int32), chunk).outputs.scores.ravel()


@pytest.mark.slow
def test_scores_are_those_of_recbole_in_any_chunks_and_with_a_suffix(tmp_path: Path) -> None:
    """RecBole's row of padding is that of unknown items."""
    engine = opened(converted(tmp_path))
    assert {min(len(case["history"]), LONGEST) for case in CASES} >= {3, 8, 15, LONGEST}
    for case in CASES:
        newest = behaviours(case["history"][-LONGEST:])
        wanted = np.array(case["scores"])
        for suffix, chunk in (
            (max(0, len(newest) - LONGEST + 4), None),
            (min(4, len(newest)), 5),
            (4 % len(newest), 1),
        ):
            error = np.abs(scores(engine, newest, suffix, chunk) - wanted).max()
            assert error < 2e-6 * np.abs(wanted).max(), (len(newest), suffix, chunk)


@pytest.mark.slow
def test_past_the_longest_list_the_newest_behaviours_are_scored_as_by_recbole(tmp_path: Path) -> None:
    """If the window moves with each behaviour, as RecBole's does."""
    engine = opened(converted(tmp_path, max_suffix=0))
    long = [case for case in CASES if len(case["history"]) > LONGEST]
    assert long
    for case in long:
        history = History("u", 0, NO_FEATURES, behaviours(case["history"]))
        cut = window(history, digest_chain(history.features, history.behaviours), LONGEST, 1)
        assert len(cut.history.behaviours) == LONGEST
        wanted = np.array(case["scores"])
        assert np.abs(scores(engine, cut.history.behaviours) - wanted).max() < 2e-6 * np.abs(wanted).max()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [each for each in KvDtype if each is not KvDtype.FLOAT32])
def test_in_fewer_bits_scores_change_by_little(tmp_path: Path, dtype: KvDtype) -> None:
    case = next(case for case in CASES if 10 < len(case["history"]) <= 16)
    wanted = np.array(case["scores"])
    found = scores(opened(converted(tmp_path), dtype), behaviours(case["history"]), 0, 5)
    assert np.abs(found - wanted).max() < 0.1 * np.ptp(wanted)


@pytest.mark.slow
def test_all_rules_hold_up_to_the_longest_list_and_check_says_that_there_is_no_reuse_past_it(tmp_path: Path) -> None:
    folder = converted(tmp_path)
    engine = engine_to_check(folder, "cpu", [MODULE])
    found = list(ModelCheck(engine, *made_sample(engine, 4), 2).run())
    assert all(each.holds for each in found), found
    assert rules_found(found) == PrefixRules()
    command = ["model", "check", str(folder), "--ranker-module", MODULE, "--minutes", "0.05"]
    said = " ".join(CliRunner().invoke(app, command).output.split())
    assert "Past 16 behaviours the window slides: the oldest are left out 4 at a time" in said
    assert "each time there is no reuse across visits" in said


@pytest.mark.slow
def test_what_is_longer_than_its_places_is_refused_and_a_user_without_a_history_is_ranked(tmp_path: Path) -> None:
    engine = opened(converted(tmp_path))
    history = behaviours(next(case for case in CASES if len(case["history"]) > LONGEST)["history"])
    with pytest.raises(TooLongError, match="17 prefix behaviours, the model takes 16"):
        scores(engine, history[:17])
    with pytest.raises(TooLongError, match="5 suffix behaviours, the model takes 4"):
        scores(engine, history[:15], 5)
    assert not scores(engine, history[:0]).any()


@pytest.mark.parametrize("numbered", NUMBERED, ids=lambda each: json.dumps(each["config"]))
def test_items_have_the_numbers_that_recbole_gave_them(numbered: dict[str, Any]) -> None:
    config = read_sasrec(HERE / "sasrec.pth").config.model_copy(
        update={"user_inter_num_interval": "[0,inf)", "item_inter_num_interval": "[0,inf)"} | numbered["config"]
    )
    assert items_of_log(HERE / "recbole.inter", config) == numbered["items"][1:]


@pytest.mark.slow
def test_the_list_of_recbole_stands_for_the_log(tmp_path: Path) -> None:
    listed = tmp_path / "items.txt"
    listed.write_text("\n".join(TRAINED["items"]))
    convert(HERE / "sasrec.pth", tmp_path / "a", "--items", listed)
    convert(HERE / "sasrec.pth", tmp_path / "b", "--log", HERE / "recbole.inter")
    first, second = ((tmp_path / name / "model.safetensors").read_bytes() for name in "ab")
    assert first == second
    listed.write_text("\n".join(TRAINED["items"][1:]))
    assert "its first line is not [PAD]" in convert(HERE / "sasrec.pth", tmp_path / "c", "--items", listed, code=1)


class TestRefused:
    """By `convert-recbole`, in one sentence."""

    @pytest.mark.parametrize(
        ("changes", "says"),
        [
            ({"rm_dup_inter": "first"}, "with rm_dup_inter"),
            ({"alias_of_item_id": ["other"]}, "with alias_of_item_id"),
            ({"benchmark_filename": ["train", "test"]}, "with benchmark_filename"),
            ({"load_col": None}, "RecBole read recbole.user, too"),
            ({"load_col": {"inter": ["user_id"], "item": "*"}}, "RecBole read recbole.item, too"),
            ({"item_field": "movie_id"}, "it has no column movie_id:token"),
            ({"val_interval": {"user_id": "[1,2]"}}, "no column user_id:float"),
            ({"val_interval": {"rating": "three"}}, "'three', which is no interval"),
            ({"field_separator": ", "}, "cannot be read"),
        ],
        ids=lambda each: "-".join(each) if isinstance(each, dict) else "",
    )
    def test_a_log_that_does_not_tell_recboles_numbers(
        self, tmp_path: Path, changes: dict[str, Any], says: str
    ) -> None:
        log = tmp_path / "recbole.inter"
        shutil.copy(HERE / "recbole.inter", log)
        (tmp_path / "recbole.item").touch()
        (tmp_path / "recbole.user").touch()
        config = read_sasrec(HERE / "sasrec.pth").config.model_copy(update=changes)
        with pytest.raises(RelayError, match=says.replace("[", r"\[")):
            items_of_log(log, config)

    def test_a_pipe_in_place_of_the_weights(self, tmp_path: Path) -> None:
        folder = converted(tmp_path)
        (folder / "model.safetensors").unlink()
        os.mkfifo(folder / "model.safetensors")
        error = outcome(lambda: engine_to_check(folder, "cpu", [MODULE]))
        assert isinstance(error, RelayError) and "not a regular file" in str(error)

    def test_a_checkpoint_of_an_older_recbole(self) -> None:
        values = read_sasrec(HERE / "sasrec.pth").config.model_dump(by_alias=True, exclude={"item_inter_num_interval"})
        with pytest.raises(RelayError, match=r"before 1\.0"):
            items_of_log(HERE / "recbole.inter", RecBoleConfig.model_validate(values))

    def test_another_log(self, tmp_path: Path) -> None:
        log = tmp_path / "other.inter"
        lines = (HERE / "recbole.inter").read_text().splitlines(keepends=True)
        log.write_text("".join(line for line in lines if "\t401\t" not in line))
        said = convert(HERE / "sasrec.pth", tmp_path / "out", "--log", log, code=1)
        assert f"sasrec.pth has {len(IDS)}: give the file with which it was trained" in said
        assert not (tmp_path / "out").exists()

    @pytest.mark.slow
    def test_options_that_exclude_each_other(self, tmp_path: Path) -> None:
        source, log = HERE / "sasrec.pth", HERE / "recbole.inter"
        assert "Give the .inter file" in convert(source, tmp_path, code=1)
        assert "leaves no history" in convert(source, tmp_path, "--log", log, "--max-suffix", LONGEST, code=1)
        convert(source, tmp_path, "--log", log)
        assert "give --force" in convert(source, tmp_path, "--log", log, code=1)
        convert(source, tmp_path, "--log", log, "--force")

    def test_items_that_a_message_cannot_tell_apart(self) -> None:
        with pytest.raises(RelayError, match=r"one id in messages, such as '12\.0'"):
            item_numbers(["12", "a", "12.0"])

    def test_what_is_no_checkpoint(self, tmp_path: Path) -> None:
        path = tmp_path / "model.pth"
        path.write_bytes(b"text")
        with pytest.raises(RelayError, match="cannot be read as a checkpoint of RecBole"):
            read_sasrec(path)
        torch.save({"weight": torch.ones(3)}, path)
        with pytest.raises(RelayError, match="it has no configuration of RecBole"):
            read_sasrec(path)

    @pytest.mark.parametrize(
        ("changes", "says"),
        [
            ({"model": "GRU4Rec"}, "it is of the model GRU4Rec"),
            ({"n_heads": "two"}, "n_heads: Input should be a valid integer"),
            ({"n_heads": 3}, "16 numbers do not divide into 3 heads"),
            ({"hidden_act": "mish"}, "activation mish is none of gelu"),
        ],
    )
    def test_other_configurations(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], says: str
    ) -> None:
        path = save_as_recbole_does(tmp_path, monkeypatch, changes)
        with pytest.raises(RelayError, match=says):
            read_sasrec(path)

    @pytest.mark.parametrize(
        ("name", "tensor", "says"),
        [
            ("item_embedding.weight", None, "it has no tensor item_embedding.weight"),
            ("LayerNorm.bias", None, "LayerNorm.bias is not that of these sizes"),
            ("LayerNorm.bias", torch.zeros(3), "LayerNorm.bias is not that of these sizes"),
            ("gate.weight", torch.zeros(3), "gate.weight is not that of these sizes"),
            ("position_embedding.weight", torch.zeros(WIDTH, LONGEST).T, "is not contiguous"),
            ("item_embedding.weight", torch.zeros(1, 1).expand(10**6, WIDTH), "larger than the file"),
        ],
    )
    def test_other_tensors(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, tensor: torch.Tensor | None, says: str
    ) -> None:
        path = save_as_recbole_does(tmp_path, monkeypatch, {}, {name: tensor})
        with pytest.raises(RelayError, match=says):
            read_sasrec(path)


class RunsCode:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_no_code_of_a_checkpoint_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    touched = tmp_path / "touched"
    path = save_as_recbole_does(tmp_path, monkeypatch, {"device": RunsCode(touched)}, other_parameter=RunsCode(touched))
    assert read_sasrec(path).items == len(IDS)
    torch.save({"config": RunsCode(touched)}, path, pickle_protocol=4)
    with pytest.raises(RelayError, match="no configuration of RecBole"):
        read_sasrec(path)
    assert not touched.exists()
    torch.load(path, weights_only=False)
    assert touched.exists()


def save_as_recbole_does(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    tensors: dict[str, torch.Tensor | None] | None = None,
    **others: Any,
) -> Path:
    """The recorded checkpoint with these changes; a tensor that is None is left out."""
    found = read_sasrec(HERE / "sasrec.pth")
    for name in ("recbole", "recbole.config", "recbole.config.configurator"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    kind = type("Config", (), {"__module__": "recbole.config.configurator"})
    monkeypatch.setattr(sys.modules["recbole.config.configurator"], "Config", kind, raising=False)
    config: Any = kind()
    config.final_config_dict = {"model": "SASRec", **found.config.model_dump(by_alias=True), **changes}
    weights = {name: tensor for name, tensor in {**found.tensors, **(tensors or {})}.items() if tensor is not None}
    path = folder / "changed.pth"
    torch.save({"config": config, "state_dict": weights, **others}, path, pickle_protocol=4)
    return path
