"""`relaygr model convert`: files in, a checkpoint and a report out, and an exit code that scripts can trust."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import save_file
from typer.testing import CliRunner, Result

from relaygr.cli.app import app
from relaygr.cli.model import read_item_ids
from relaygr.runtime.errors import RelayError
from relaygr.worker.model.checkpoint import load_checkpoint
from relaygr.worker.model.convert.state_dict import read_state_dict
from tests.workers.vector_models import make_dlrm
from tests.worlds.converted import Tensors, dlrm_state_dict

OPTIONS = ["--heads", "2", "--normalizer", "40", "--task", "click", "--task", "watch:regression"]
NAMES = ["--feature", "user_id", "--feature", "region"]
FEATURES = [*NAMES, "--hide-below", "none"]


@pytest.fixture
def source() -> Tensors:
    return {name: tensor.clone() for name, tensor in dlrm_state_dict(make_dlrm()).items()}


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["model", "convert", "--from", "meta", *map(str, arguments)])


def test_a_complete_source_becomes_a_checkpoint_and_a_report(tmp_path: Path, source: Tensors) -> None:
    torch.save({"state_dict": {f"module.{name}": tensor for name, tensor in source.items()}}, tmp_path / "model.pt")
    done = run(tmp_path / "model.pt", tmp_path / "out", *OPTIONS, *FEATURES, "--report", tmp_path / "report.json")
    assert done.exit_code == 0, done.output
    checkpoint = load_checkpoint(tmp_path / "out")
    assert [task.name for task in checkpoint.config.tasks] == ["click", "watch"]
    assert checkpoint.revision in done.output
    report = json.loads((tmp_path / "report.json").read_text())
    assert {key: len(report[key]) for key in ("left_over", "missing")} == {"left_over": 0, "missing": 0}
    mapped = {entry["target"]: entry for entry in report["mapped"]}
    assert mapped["content.0.weight"]["transform"] == "transposed"
    assert mapped["content.0.weight"]["source_shape"] == mapped["content.0.weight"]["shape"][::-1]
    told = "--heads 2, --normalizer 40, the order of --feature, the order of --task"
    assert f"note: No tensor proves {told}" in done.output
    shown = CliRunner().invoke(app, ["model", "show", str(tmp_path / "out")])
    assert "dlrm, 3 kinds of action" in shown.output
    assert "from the end" in shown.output


def claimed_array(path: Path, shape: tuple[int, ...]) -> None:
    """A file of some hundred bytes whose header claims this shape."""
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "<i8", "fortran_order": False, "shape": shape})
        file.write(bytes(64))


@pytest.mark.parametrize("shape", [(2**40,), (2**62, 4), (2**31, 2**31)])
def test_an_array_that_claims_more_than_its_file_holds_is_refused(
    tmp_path: Path, source: Tensors, shape: tuple[int, ...]
) -> None:
    """2**40 numbers are 8 TiB. No memory may be taken for them."""
    save_file(source, tmp_path / "model.safetensors")
    claimed_array(tmp_path / "ids.npy", shape)
    refused = run(
        tmp_path / "model.safetensors", tmp_path / "out", *OPTIONS, *FEATURES, "--items", tmp_path / "ids.npy"
    )
    assert refused.exit_code == 1
    assert "cannot be read as an .npy file" in " ".join(refused.output.split())
    with pytest.raises(RelayError, match="cannot be read as item ids"):
        read_item_ids(tmp_path / "ids.npy")


def repeated(path: Path) -> None:
    """One stored number, 1.7e10 times."""
    torch.save({"a": torch.zeros(1).expand(17_000_000_000)}, path)


def compressed(path: Path) -> None:
    """Zeros, which take a thousandth of their size."""
    plain = path.with_name("plain")
    torch.save({"a": torch.zeros(1_000_000)}, plain)
    with zipfile.ZipFile(plain) as tensors, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as smaller:
        for name in tensors.namelist():
            smaller.writestr(name, tensors.read(name))
    plain.unlink()


def shared(path: Path) -> None:
    """A hundred tensors in the memory of one."""
    one = torch.zeros(100_000)
    torch.save({str(number): one for number in range(100)}, path)


def sparse(path: Path) -> None:
    """One number, and a shape of 1.7e10."""
    torch.save({"a": torch.sparse_coo_tensor(torch.zeros(1, 1, dtype=torch.int64), torch.ones(1), (2**34,))}, path)


@pytest.mark.parametrize(
    ("make", "fault"),
    [
        (repeated, "17,000,000,000 elements, but fewer are stored"),
        (compressed, "claims to hold 4,"),
        (shared, "because they share memory"),
        (sparse, "not a plain tensor"),
    ],
)
def test_a_small_file_that_claims_large_tensors_is_refused(
    tmp_path: Path, make: Callable[[Path], None], fault: str
) -> None:
    make(tmp_path / "model.pt")
    with pytest.raises(RelayError, match=f"model.pt is refused: .*{fault}"):
        read_state_dict(tmp_path / "model.pt")


def test_tied_tensors_and_views_are_read(tmp_path: Path) -> None:
    whole = torch.arange(1000.0)
    torch.save({"tied": whole, "also": whole, "a part": whole[10:20]}, tmp_path / "model.pt")
    assert read_state_dict(tmp_path / "model.pt").tensors["a part"].tolist() == list(range(10, 20))


def test_what_is_left_over_or_missing_is_an_error_unless_it_is_allowed(tmp_path: Path, source: Tensors) -> None:
    source["optimizer.step"] = torch.zeros(1)
    name = "_hstu_transducer._output_postprocessor._layer_norm.bias"
    del source[name]
    save_file(source, tmp_path / "model.safetensors")
    arguments = (tmp_path / "model.safetensors", tmp_path / "out", *OPTIONS, *FEATURES)
    refused = run(*arguments)
    assert refused.exit_code == 1
    assert "1 left over, 1 missing" in refused.output
    assert "optimizer.step" in refused.output
    assert f"the source has no {name}" in refused.output
    assert not (tmp_path / "out").exists()
    assert run(*arguments, "--allow-left-over").exit_code == 0
    assert not load_checkpoint(tmp_path / "out").tensors["readout.norm.bias"].any()


def test_options_may_stand_in_a_file_and_are_overridden_on_the_command_line(tmp_path: Path, source: Tensors) -> None:
    save_file(source, tmp_path / "model.safetensors")
    values = {
        "heads": 2,
        "normalizer": 40,
        "max_candidates": 7,
        "tasks": [{"name": "click"}, {"name": "watch", "kind": "regression"}],
        "features": [{"name": "user_id", "min_tokens": 4}, {"name": "region"}],
    }
    (tmp_path / "options.yaml").write_text(yaml.safe_dump(values))
    arguments = (tmp_path / "model.safetensors", tmp_path / "out", "--config", tmp_path / "options.yaml")
    assert run(*arguments, "--max-candidates", 9).exit_code == 0
    assert load_checkpoint(tmp_path / "out").config.max_candidates == 9
    again = run(*arguments)
    assert "already contains a checkpoint" in again.output
    (tmp_path / "options.yaml").write_text("headz: 3\n")
    wrong = run(*arguments, "--force")
    assert wrong.exit_code != 0
    assert "headz" in wrong.output


def test_a_feature_is_hidden_from_short_sequences_where_it_is_said(tmp_path: Path, source: Tensors) -> None:
    save_file(source, tmp_path / "model.safetensors")
    done = run(tmp_path / "model.safetensors", tmp_path / "out", *OPTIONS, *NAMES, "--hide-below", "user_id=4")
    assert done.exit_code == 0, done.output
    assert "--hide-below user_id=4" in done.output
    assert [f.min_tokens for f in load_checkpoint(tmp_path / "out").config.contextual_features] == [4, 0]
    again = run(tmp_path / "model.safetensors", tmp_path / "out2", *OPTIONS, *NAMES, "--hide-below", "planet=4")
    assert "there is no such --feature" in " ".join(again.output.split())


def test_whether_features_are_hidden_must_be_told(tmp_path: Path, source: Tensors) -> None:
    save_file(source, tmp_path / "model.safetensors")
    asked = run(tmp_path / "model.safetensors", tmp_path / "out", *OPTIONS, *NAMES)
    assert asked.exit_code == 1
    assert "--hide-below (the fewest tokens that show each feature, as NAME=TOKENS, or none)" in asked.output
    assert not (tmp_path / "out").exists()


def test_what_it_must_be_told_is_named_as_options(tmp_path: Path, source: Tensors) -> None:
    save_file(source, tmp_path / "model.safetensors")
    done = run(tmp_path / "model.safetensors", tmp_path / "out", "--heads", 2)
    assert done.exit_code != 0
    text = " ".join(done.output.split())
    for option in ("--normalizer", "--task", "--feature"):
        assert option in text
    assert "--heads" not in text


@pytest.mark.parametrize(
    ("told", "sentence"),
    [
        ("--target-group-size 2 --action-weight 1 --log-base 0.5", "does not take --log-base, --target-group-size"),
        ("--table brand=brands.npy", "tables names brand, and there is no such feature"),
        ("--item-values brand=brands.npy", "item_values names brand, and there is no such feature"),
    ],
)
def test_what_would_change_nothing_is_refused(tmp_path: Path, source: Tensors, told: str, sentence: str) -> None:
    save_file(source, tmp_path / "model.safetensors")
    done = run(tmp_path / "model.safetensors", tmp_path / "out", *OPTIONS, *FEATURES, *told.split())
    assert done.exit_code != 0
    assert sentence in " ".join(done.output.split())


def test_a_folder_of_files_is_one_source(tmp_path: Path, source: Tensors) -> None:
    tables = {name: tensor for name, tensor in source.items() if "embeddings" in name}
    torch.save({name: tensor for name, tensor in source.items() if name not in tables}, tmp_path / "dense.bin")
    save_file(tables, tmp_path / "tables.safetensors")
    assert set(read_state_dict(tmp_path).tensors) == set(source)
    save_file(tables, tmp_path / "twice.safetensors")
    with pytest.raises(RelayError, match="twice"):
        read_state_dict(tmp_path)


def test_nothing_but_tensors_is_loaded(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[object, ...]:
            return Path.touch, (tmp_path / "sprung",)

    torch.save({"x": torch.zeros(1), "trap": Trap()}, tmp_path / "model.pt")
    with pytest.raises(RelayError, match="more than tensors"):
        read_state_dict(tmp_path / "model.pt")
    assert not (tmp_path / "sprung").exists()


class Library:
    """Stands for a class of a training library."""

    def __init__(self) -> None:
        self.step = torch.ones(1)


def test_objects_of_other_classes_are_named_and_not_loaded(tmp_path: Path) -> None:
    torch.save({"x": torch.zeros(1), "state": Library()}, tmp_path / "model.pt")
    found = read_state_dict(tmp_path / "model.pt")
    assert (set(found.tensors), found.others) == ({"x"}, ("state",))


def test_what_is_no_state_dict_is_refused_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(RelayError, match="does not exist"):
        read_state_dict(tmp_path / "model.pt")
    (tmp_path / "model.pt").write_bytes(b"text")
    with pytest.raises(RelayError, match=r"model\.pt"):
        read_state_dict(tmp_path / "model.pt")
    torch.save([1, 2], tmp_path / "model.pt")
    with pytest.raises(RelayError, match="holds list"):
        read_state_dict(tmp_path / "model.pt")
    torch.save({"step": 3}, tmp_path / "model.pt")
    with pytest.raises(RelayError, match="holds no tensor"):
        read_state_dict(tmp_path / "model.pt")
    (tmp_path / "model.pt").unlink()
    (tmp_path / "model.safetensors").write_bytes(b"text")
    with pytest.raises(RelayError, match="cannot be read as a state dict"):
        read_state_dict(tmp_path)


def test_item_ids_and_values_of_features_come_from_files(tmp_path: Path) -> None:
    made = make_dlrm(features=2, contextual=())
    source = {name: tensor.clone() for name, tensor in dlrm_state_dict(made).items()}
    save_file(source, tmp_path / "model.safetensors")
    count = source["_embedding_collection.embeddings.item.weight"].shape[0]
    np.save(tmp_path / "ids.npy", np.arange(count)[::-1] * 5)
    np.save(tmp_path / "maker.npy", np.arange(count))
    options = ["--item-feature", "maker", "--items", tmp_path / "ids.npy"]
    asked = run(tmp_path / "model.safetensors", tmp_path / "out", *OPTIONS, *options)
    assert "--item-values maker=FILE.npy" in " ".join(asked.output.split())
    values = ["--item-values", f"maker={tmp_path / 'maker.npy'}"]
    done = run(tmp_path / "model.safetensors", tmp_path / "out", *OPTIONS, *options, *values)
    assert done.exit_code == 0, done.output
    tensors = load_checkpoint(tmp_path / "out").tensors
    assert tensors["items.ids"].tolist() == [5 * row for row in range(count)]
    assert tensors["item_features.0.rows"].tolist() == [*reversed(range(count)), count]
    assert torch.equal(tensors["items.weight"][0], source["_embedding_collection.embeddings.item.weight"][-1])
