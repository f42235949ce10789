"""Commands on the folder of a team's own ranker: each takes it, or says in a sentence why it cannot."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import fsspec
import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from relaygr.cli.app import app
from relaygr.doctor import observe
from relaygr.doctor.judge import Verdict
from relaygr.ingest.known import SentInputs
from relaygr.ranker import History, ModelFolder, Past
from relaygr.runtime.errors import RelayError
from relaygr.schemas.messages import BehaviourEvent, Behaviours
from relaygr.settings import load_settings
from relaygr.worker.model.config import PrefixRules
from relaygr.worker.model.engine import engine_to_check, load_engine
from relaygr.worker.model.ranker_engine import RankerEngine
from relaygr.worker.model.rankers import RECORD_FILE, read_ranker, read_record, write_record
from tests.worlds.other_rankers import Other
from tests.worlds.toy_rankers import DIM, ITEMS, LAYERS, MODULE, Decoder, checked, write_folder


@pytest.fixture
def ranker(tmp_path: Path) -> Path:
    """Rows of 12 numbers of K and of V in two layers, and as many of state; it may grow, in one chunk."""
    folder = write_folder(tmp_path / "ranker")
    engine = engine_to_check(folder, "cpu", [MODULE])
    assert isinstance(engine, RankerEngine) and engine.record is not None
    write_record(folder, replace(engine.record, rules=PrefixRules(chunks=False)))
    return folder


def said(*words: object, code: int = 0) -> str:
    done = CliRunner().invoke(app, [*map(str, words)], env={"COLUMNS": "300"})
    assert done.exit_code == code, done.output
    return " ".join(done.output.split())


def test_show_says_what_a_ranker_takes_and_what_it_needs_and_runs_no_code(
    ranker: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relaygr.worker.model.rankers.import_module", lambda name: pytest.fail(f"{name} was imported"))
    shown = said("model", "show", ranker)
    # Two layers and the states: three of 24 numbers.
    for part in (
        f"revision {read_ranker(ranker).revision}",
        "2 of 1 heads, k 12, v 12, 12 numbers of state",
        "may grow, computed in one chunk, valid at any time",
        "K,V in float32 288 bytes a behaviour, longest prefix 0.0 MiB",
        "96 prefix and 16 suffix behaviours, 32 candidates",
        f"worker.ranker_modules [{MODULE}], for commands --ranker-module {MODULE}",
    ):
        assert part in shown
    found = json.loads(said("model", "show", ranker, "--json"))
    assert (found["shape"]["state_dim"], found["kv_bytes_per_token"]["bfloat16"]) == (12, 144)


def test_what_a_ranker_prints_is_not_in_the_json(tmp_path: Path) -> None:
    model = checked(tmp_path, "Talks")
    for command in (
        ("model", "check", "MODEL", "--minutes", "0.05", "--kv-dtype", "bfloat16"),
        ("model", "check-kv", "MODEL", "--kv-dtype", "bfloat16", "--users", "1"),
        ("model", "bench", "MODEL", "--length", "64", "--candidates", "8", "--repeats", "1"),
        ("calibrate", "--model", "MODEL", "--quick"),
    ):
        words = [word.replace("MODEL", str(model)) for word in command]
        done = CliRunner().invoke(app, [*words, "--ranker-module", MODULE, "--json"])
        assert "the tables are loaded" in done.stderr and json.loads(done.stdout), command


def test_nothing_is_said_about_items_of_which_only_the_rankers_code_knows_whether_it_knows_them(ranker: Path) -> None:
    inputs = SentInputs(ranker)
    inputs.take(BehaviourEvent("ann", Behaviours.of([(10**12, 2, 1_700_000_000_000)])))
    assert inputs.text() == ", action codes 2"


def test_the_scores_of_a_ranker_are_compared_with_those_of_its_training_code(tmp_path: Path) -> None:
    """Here with those of its own code in one pass. `model check` compares a ranker with itself alone."""
    model, random = checked(tmp_path / "model"), np.random.default_rng(0)
    own = Decoder(ModelFolder(model, {}, torch.device("cpu"), torch.float32))
    requests, file = [], tmp_path / "requests.jsonl"
    for length in (1, 30):
        items, candidates = (random.permutation(ITEMS)[:count] for count in (length, 12))
        history = History(*(torch.from_numpy(each) for each in (items, items % 3, items, items[:0])))
        computed = own.prefix(history, 0, length, Past(0, LAYERS, lambda _: (torch.zeros(1, 0, DIM),) * 2))
        assert computed.states is not None
        nothing = History(*(history.features,) * 4)
        scores = own.rank(nothing, torch.from_numpy(candidates), Past(0, 0, pytest.fail), computed.states[-1])[:, 0]
        row = {"items": items.tolist(), "actions": (items % 3).tolist(), "candidates": candidates.tolist()}
        requests.append({**row, "scores": {"score": scores.tolist()}})
    file.write_text("\n".join(map(json.dumps, requests)))
    command = ("model", "compare", model, "--requests", file, "--ranker-module", MODULE)
    assert "The scores agree." in said(*command)
    requests[1]["items"].reverse()
    file.write_text("\n".join(map(json.dumps, requests)))
    assert "`prefix` and `rank` compute something else than your training code" in said(*command, code=1)


@pytest.mark.parametrize(
    "command",
    [
        ("model", "verify", "MODEL"),
        ("model", "init", "OUT", "--config", "MODEL/config.json"),
    ],
    ids=lambda words: words[1],
)
def test_a_command_for_our_own_layers_says_that_it_got_a_ranker(
    ranker: Path, tmp_path: Path, command: tuple[str, ...]
) -> None:
    words = [word.replace("MODEL", str(ranker)).replace("OUT", str(tmp_path / "out")) for word in command]
    expected = f"{ranker}/config.json is the configuration of a ranker of your own, and this needs a model of our own"
    assert expected in said(*words, code=1)


def test_a_ranker_is_deployed_without_its_code_and_again_with_what_was_found_since(
    ranker: Path, tmp_path: Path
) -> None:
    served = tmp_path / "served"
    revision = read_ranker(ranker).revision
    assert f"{revision} serves" in said("model", "deploy", ranker, served, "--calibrate-at-start")
    write_record(ranker, replace(read_record(ranker), rules=PrefixRules()))
    assert f"{revision} serves" in said("model", "deploy", ranker, served, "--calibrate-at-start")
    assert read_record(served / "current").rules.chunks
    assert read_ranker(served / "current").revision == revision


def test_a_ranker_that_was_not_checked_is_not_deployed(ranker: Path, tmp_path: Path) -> None:
    (ranker / RECORD_FILE).unlink()
    said_then = said("model", "deploy", ranker, tmp_path / "served", "--calibrate-at-start", code=1)
    assert f"run `relaygr model check {ranker}` first" in said_then
    assert not (tmp_path / "served").exists()


def test_a_ranker_in_object_storage_is_fetched_with_every_file(ranker: Path, tmp_path: Path) -> None:
    (ranker / "tables").mkdir()
    (ranker / "tables" / "brands.txt").write_text("7\n")
    files = fsspec.filesystem("memory")
    files.put(f"{ranker}/", "/rankers/ours/", recursive=True)
    try:
        said("model", "deploy", "memory://rankers/ours", tmp_path / "served", "--calibrate-at-start")
    finally:
        files.rm("/rankers", recursive=True)
    assert read_ranker(tmp_path / "served" / "current").revision == read_ranker(ranker).revision
    assert (tmp_path / "served" / "current" / "tables" / "brands.txt").read_text() == "7\n"


def test_what_lies_behind_a_link_to_a_folder_is_deployed_or_the_source_refused(ranker: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "decoder.bin").write_text("7")
    (ranker / "decoder").symlink_to("../cache")
    said("model", "deploy", ranker, tmp_path / "served", "--calibrate-at-start")
    assert read_ranker(tmp_path / "served" / "current").revision == read_ranker(ranker).revision
    assert (tmp_path / "served" / "current" / "decoder" / "decoder.bin").read_text() == "7"
    refused = said("model", "deploy", ranker.as_uri(), tmp_path / "other", "--calibrate-at-start", code=1)
    assert "decoder is a link to a folder, which is not fetched" in refused and not (tmp_path / "other").exists()


def test_the_doctor_reads_a_ranker_and_says_if_its_code_may_not_run(ranker: Path) -> None:
    [found] = observe.checkpoint(ranker, [MODULE])
    assert found.verdict is Verdict.OK and read_ranker(ranker).revision in found.what
    with pytest.raises(RelayError, match=r"runs only if worker\.ranker_modules"):
        observe.checkpoint(ranker, ["another"])
    shutil.rmtree(ranker)
    [found] = observe.checkpoint(ranker, [])
    assert found.verdict is Verdict.SKIP


@pytest.mark.parametrize("version", [None, "1"])
def test_a_check_says_which_files_of_the_code_no_version_covers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str | None
) -> None:
    code = tmp_path / "code"
    code.mkdir()
    (code / "team_layers.py").write_text(f"from {MODULE} import Decoder\nclass Base(Decoder):\n    pass\n")
    (code / "team_ranker.py").write_text(
        f"import json\nfrom team_layers import Base\nclass Ours(Base):\n    version = {version!r}\n"
    )
    monkeypatch.syspath_prepend(str(code))
    for name in ("team_layers", "team_ranker"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    folder = write_folder(tmp_path / "ranker")
    (folder / "config.json").write_text(json.dumps({"ranker": "team_ranker:Ours", "options": {}}))
    told = said("model", "check", folder, "--ranker-module", "team_ranker", "--minutes", 0.05, "--kv-dtype", "float32")
    note = "Note: the version of team_ranker:Ours is a hash of one file, which imports from team_layers.py."
    assert (note in told) is (version is None)


def test_a_list_of_modules_that_is_none_is_told_how_it_is_written() -> None:
    with pytest.raises(RelayError, match=r"worker.ranker_modules = 'ours' \(--set\): .* write a list such as \[a, b\]"):
        load_settings(overrides=["worker.ranker_modules=ours"])


def test_a_process_that_loaded_the_code_before_it_was_replaced_refuses_a_model_of_the_new_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new file would vouch for what the old code computes."""
    monkeypatch.syspath_prepend(str(tmp_path))
    source = tmp_path / "replaced_ranker.py"
    source.write_text("from tests.worlds.toy_rankers import Decoder\n\n\nclass Ours(Decoder):\n    pass\n")
    folder = write_folder(tmp_path / "model")
    (folder / "config.json").write_text('{"ranker": "replaced_ranker:Ours"}')
    old = engine_to_check(folder, "cpu", ["replaced_ranker"])
    assert isinstance(old, RankerEngine) and old.record is not None
    source.write_text(source.read_text() + "\n    places = None\n")
    new_version = hashlib.blake2b(source.read_bytes(), digest_size=16).hexdigest()
    write_record(folder, replace(old.record, version=new_version))
    with pytest.raises(RelayError, match="restart processes that loaded the code before"):
        load_engine(folder, "cpu", ranker_modules=["replaced_ranker"])


@pytest.mark.slow
@pytest.mark.parametrize("other", Other)
def test_each_command_of_the_page_works_on_the_rankers_that_others_wrote(other: Other, tmp_path: Path) -> None:
    model, calibration = str(tmp_path / "model"), str(tmp_path / "calibration.json")
    code = ["--ranker-module", other.module]
    fleet = ["--model", model, "--calibration", calibration, "--qps", "20", "--jobs", "1"]
    traffic = ["--set", "traffic.candidates=10", "--set", "traffic.suffix=2"]
    unchecked, checked, shown, calibrated, too_much, simulated, sized, refused, measured = other.said(
        Path(model),
        ["model", "show", model],
        ["model", "check", model, *code, "--minutes", "0.05"],
        ["model", "show", model],
        ["calibrate", "--model", model, "--out", calibration, "--quick", *code],
        ["simulate", "run", *fleet, "--set", "traffic.candidates=1000"],
        ["simulate", "run", *fleet, *traffic, "--seconds", "20", "--seeds", "1"],
        ["size", *fleet, *traffic, "--users", "1000", "--length", "10:14", "--impressions", "600"],
        ["model", "bench", model, *code, "--candidates", "1000"],
        ["model", "bench", model, *code, "--candidates", "10", "--repeats", "1"],
    )
    for (exit_code, text), expected in (
        (unchecked, f"run `relaygr model check {model}` first"),
        (too_much, "lower traffic.candidates or traffic.suffix"),
        (refused, "give a smaller --length or --candidates"),
    ):
        assert exit_code == 1 and expected in text
    for (exit_code, text), expected in (
        (checked, "can be served; the relay serves each visit from the K,V of the visits before"),
        (shown, "may grow, computed in any chunks, valid at any time"),
        (calibrated, f"written to {calibration}"),
        (simulated, "requests counted"),
        (sized, "Workers for 20 impressions a second, 99 % within"),
        (measured, "Device work of a visit"),
    ):
        assert exit_code == 0 and expected in text, text
