"""Checkpoints are read back as written; a tensor that disagrees is refused with its name and both shapes."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from relaygr.cli.model import app, read_item_ids
from relaygr.runtime.errors import RelayError
from relaygr.schemas.messages import Behaviours
from relaygr.worker.measuring import bind_own_arena
from relaygr.worker.model import checkpoint as checkpoint_module
from relaygr.worker.model.checkpoint import (
    WEIGHTS_FILE,
    compute_digests,
    compute_revision,
    expected_tensors,
    load_checkpoint,
    random_checkpoint,
    save_checkpoint,
    verify_checkpoint,
)
from relaygr.worker.model.config import CONFIG_FILE, ModelConfig, parse_config, read_config
from relaygr.worker.model.engine import load_engine
from relaygr.worker.model.inputs.known import ACTIONS_FILE, IDS_TENSOR, Vocabulary, read_action_names
from relaygr.worker.model.inputs.lookup import FeatureRows
from relaygr.worker.model.interface import PrefixChunk
from relaygr.worker.model.options import ContextualFeature, Family
from tests.worlds.model import VOCABULARY, configs, small_config


@settings(max_examples=15, deadline=None)
@given(config=configs())
def test_any_configuration_survives_its_json(config: ModelConfig) -> None:
    assert parse_config(config.to_json(), "here") == config


def test_every_key_of_the_configuration_is_documented() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "model.md").read_text(encoding="utf-8")
    assert [key for key in ModelConfig.model_fields if f"`{key}`" not in text] == []


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_the_files_of_a_checkpoint_follow_the_umask(tmp_path: Path, umask: int, mode: int) -> None:
    """Otherwise only the user who made a model could serve it."""
    before = os.umask(umask)
    try:
        made = random_checkpoint(small_config(), 0)
        save_checkpoint(tmp_path, made.config, made.tensors)
    finally:
        os.umask(before)
    assert {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {
        "config.json": mode,
        "model.safetensors": mode,
    }


def test_a_checkpoint_is_read_back_with_the_same_revision(tmp_path: Path) -> None:
    config = small_config()
    ids = np.arange(VOCABULARY, dtype=np.int64) * 7 - 20
    made = random_checkpoint(config, 0, ids)
    saved = save_checkpoint(tmp_path / "model", config, made.tensors)
    loaded = load_checkpoint(tmp_path / "model")
    assert loaded.revision == saved.revision == made.revision
    assert loaded.config == config
    assert all(torch.equal(loaded.tensors[name], tensor) for name, tensor in made.tensors.items())
    assert loaded.vocabulary().rows(np.array([-20, -13, 0])).rows.tolist() == [0, 1, VOCABULARY]


def test_one_other_weight_or_option_is_another_revision() -> None:
    config = small_config()
    checkpoint = random_checkpoint(config, 0)
    tensors = {name: tensor.clone() for name, tensor in checkpoint.tensors.items()}
    tensors["layers.1.output.weight"][3, 2] += 1e-6
    assert compute_revision(config, tensors) != checkpoint.revision
    assert compute_revision(small_config(normalizer=50.5), checkpoint.tensors) != checkpoint.revision
    assert random_checkpoint(config, 0).revision == checkpoint.revision


def test_tensors_that_disagree_are_each_named_with_both_shapes(tmp_path: Path) -> None:
    config = small_config()
    tensors = dict(random_checkpoint(config, 0).tensors)
    save_checkpoint(tmp_path, config, tensors)
    other = json.loads((tmp_path / CONFIG_FILE).read_text())
    other |= {"embedding_dim": 24, "num_positions": 0, "output_bias": True}
    (tmp_path / CONFIG_FILE).write_text(json.dumps(other))
    with pytest.raises(RelayError) as refusal:
        load_checkpoint(tmp_path)
    text = str(refusal.value)
    assert "layers.0.output.bias is missing, expected [24]" in text
    assert "items.weight is [41, 16], expected [41, 24]" in text
    assert "more" in text


@pytest.mark.parametrize(
    ("name", "tensor", "sentence"),
    [
        ("extra", torch.zeros(2), r"extra \[2\] is not part of this configuration"),
        ("positions.weight", torch.full((300, 16), float("nan")), "positions.weight holds values that are not finite"),
        ("positions.weight", torch.zeros(300, 16, dtype=torch.int32), "positions.weight is torch.int32"),
        (IDS_TENSOR, torch.zeros(VOCABULARY, dtype=torch.int64), "does not rise strictly"),
        (IDS_TENSOR, torch.arange(3), r"items.ids is torch.int64 \[3\], expected int64 \[40\]"),
    ],
)
def test_a_tensor_that_is_wrong_is_refused(name: str, tensor: torch.Tensor, sentence: str, tmp_path: Path) -> None:
    config = small_config()
    with pytest.raises(RelayError, match=sentence):
        save_checkpoint(tmp_path, config, {**random_checkpoint(config, 0).tensors, name: tensor})


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"num_heads": 0}, "num_heads: Input should be greater than or equal to 1"),
        ({"normalizer": 0}, "normalizer: Input should be greater than 0"),
        ({"normalizer": float("inf")}, "normalizer: Input should be a finite number"),
        ({"heads": 4}, "heads: Extra inputs are not permitted"),
        ({"tasks": []}, "tasks: Tuple should have at least 1 item"),
        ({"tasks": [{"name": "a"}, {"name": "a"}]}, "tasks contains a name twice"),
        ({"group_norm": True, "norm_affine": False}, "group_norm needs norm_affine"),
        ({"format": 2}, "format: Input should be 1"),
    ],
)
def test_a_configuration_that_is_wrong_is_refused_by_key(change: dict[str, object], sentence: str) -> None:
    values = json.loads(small_config().to_json()) | change
    with pytest.raises(RelayError, match=sentence):
        parse_config(json.dumps(values), "config.json")


def test_files_that_are_not_there_or_broken_are_refused_with_their_path(tmp_path: Path) -> None:
    with pytest.raises(RelayError, match="relaygr model init"):
        load_checkpoint(tmp_path)
    config = small_config()
    save_checkpoint(tmp_path, config, random_checkpoint(config, 0).tensors)
    (tmp_path / "model.safetensors").write_bytes(b"not tensors")
    with pytest.raises(RelayError, match=r"model\.safetensors cannot be read"):
        load_checkpoint(tmp_path)


def test_weights_that_cannot_be_opened_are_refused_with_the_systems_reason(tmp_path: Path) -> None:
    """For safetensors a file without the right to read it is a file that is not there."""
    config = small_config()
    save_checkpoint(tmp_path, config, random_checkpoint(config, 0).tensors)
    weights = tmp_path / "model.safetensors"
    weights.unlink()
    weights.symlink_to(weights)
    with pytest.raises(RelayError, match=r"model\.safetensors cannot be read: .*Too many levels of symbolic links"):
        load_checkpoint(tmp_path)


def test_half_precision_weights_become_float32_and_tables_stay_as_they_are(tmp_path: Path) -> None:
    config = small_config(contextual_features=(ContextualFeature(name="country", cardinality=3),))
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in random_checkpoint(config, 0).tensors.items()}
    save_checkpoint(tmp_path, config, tensors)
    loaded = load_checkpoint(tmp_path)
    kept = {name for name, tensor in loaded.tensors.items() if tensor.dtype is torch.bfloat16}
    assert kept == {"items.weight", "features.0.weight"}
    assert {tensor.dtype for name, tensor in loaded.tensors.items() if name not in kept} == {torch.float32}
    assert loaded.revision == compute_revision(config, tensors)


def changed(path: Path, name: str) -> None:
    """Changes one byte of a tensor in place, as a copy that went wrong does."""
    with path.open("r+b") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        start = json.loads(file.read(header_bytes))[name]["data_offsets"][0] + 8 + header_bytes
        file.seek(start)
        byte = file.read(1)[0]
        file.seek(start)
        file.write(bytes([byte ^ 1]))


def test_a_file_that_was_changed_in_place_is_refused_and_its_tensor_is_named(tmp_path: Path) -> None:
    made = random_checkpoint(small_config(), 0)
    save_checkpoint(tmp_path, made.config, made.tensors)
    weights = tmp_path / "model.safetensors"
    time_ns = weights.stat().st_mtime_ns
    changed(weights, "items.weight")
    with pytest.raises(RelayError, match=r"was changed after it was written: items\.weight differ"):
        load_checkpoint(tmp_path)
    # Only reading the file finds a change that hides its time.
    os.utime(weights, ns=(time_ns, time_ns))
    assert load_checkpoint(tmp_path).revision == made.revision
    found = CliRunner().invoke(app, ["verify", str(tmp_path)])
    assert (found.exit_code, "items.weight" in found.output) == (1, True)


def test_a_copy_is_read_whole_until_it_is_verified(tmp_path: Path) -> None:
    made = random_checkpoint(small_config(), 0)
    save_checkpoint(tmp_path, made.config, made.tensors)
    weights = tmp_path / "model.safetensors"
    time_ns = weights.stat().st_mtime_ns
    os.utime(weights)
    assert load_checkpoint(tmp_path).revision == made.revision
    assert not verify_checkpoint(tmp_path, trust=False).is_trusted
    verified = CliRunner().invoke(app, ["verify", str(tmp_path)])
    assert (verified.exit_code, "agrees with its digests" in verified.output) == (0, True)
    assert weights.stat().st_mtime_ns // 10**9 == time_ns // 10**9
    assert verify_checkpoint(tmp_path, trust=False).is_trusted


def test_a_file_of_another_tool_has_the_same_revision_and_its_values_are_checked(tmp_path: Path) -> None:
    made = random_checkpoint(small_config(), 0)
    save_checkpoint(tmp_path, made.config, made.tensors)
    save_file(dict(made.tensors), tmp_path / "model.safetensors")
    assert load_checkpoint(tmp_path).revision == made.revision
    verified = CliRunner().invoke(app, ["verify", str(tmp_path)])
    assert (verified.exit_code, "has no digests" in verified.output) == (1, True)
    tensors = {**made.tensors, "items.weight": torch.full_like(made.tensors["items.weight"], float("inf"))}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(RelayError, match=r"items\.weight holds values that are not finite"):
        load_checkpoint(tmp_path)


def sparse_checkpoint(folder: Path, items: int) -> ModelConfig:
    """A model whose item table takes no space on the disk: zeros that were never written."""
    config = small_config(embedding_dim=512, vocabulary_size=items - 1)
    small = random_checkpoint(small_config(embedding_dim=512, vocabulary_size=1), 0)
    stored = {name: tensor for name, tensor in small.tensors.items() if name != "items.weight"}
    header: dict[str, object] = {}
    at = 0
    for name, tensor in stored.items():
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [at, at + tensor.nbytes]}
        at += tensor.nbytes
    end = at + items * 512 * 4
    header["items.weight"] = {"dtype": "F32", "shape": [items, 512], "data_offsets": [at, end]}
    # Nobody computes the table's digest: loading trusts it, whatever it is.
    digests = {**compute_digests(stored), "items.weight": "0" * 32}
    header["__metadata__"] = {"relaygr": json.dumps({"time_s": 1_700_000_000, "digests": digests})}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path = folder / "model.safetensors"
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in stored.values():
            file.write(tensor.numpy().tobytes())
        file.truncate(8 + len(text) + end)
    os.utime(path, (1_700_000_000, 1_700_000_000))
    (folder / CONFIG_FILE).write_text(config.to_json())
    return config


@pytest.mark.skipif(sys.platform != "linux", reason="a sparse file, and resident memory")
def test_ten_million_items_of_512_numbers_are_loaded_and_served_without_reading_the_table(tmp_path: Path) -> None:
    """20 GB: reading it would take minutes and all of this machine's memory."""
    sparse_checkpoint(tmp_path, 10_000_000)
    assert (tmp_path / "model.safetensors").stat().st_blocks * 512 < 2**24
    before = psutil.Process().memory_info().rss
    engine = load_engine(tmp_path, "cpu")
    bind_own_arena(engine)
    items = np.linspace(0, 9_999_998, 32).astype(np.int64)
    history = Behaviours(items, np.zeros(32, np.uint16), np.arange(32, dtype=np.int64))
    inputs = engine.prefix_inputs(np.empty(0, np.int64), history)
    pages = np.arange(engine.geometry.pages_for(inputs.tokens), dtype=np.int32)
    engine.pre_infer(PrefixChunk(inputs, 0, inputs.tokens, pages))
    scores = engine.rank([engine.rank_inputs(inputs.tokens, pages, Behaviours.empty(), items)])[0].scores
    assert np.isfinite(scores).all()
    assert psutil.Process().memory_info().rss - before < 2**30
    assert engine.weights_bytes < 2**27


def test_a_vocabulary_finds_each_id_and_counts_the_others() -> None:
    ids = np.array([-5, 3, 4, 2**62], dtype=np.int64)
    found = Vocabulary(4, ids).rows(np.array([3, 2**62, 5, -5, 2**63 - 1, -(2**63)]))
    assert found.rows.tolist() == [1, 3, 4, 0, 4, 4]
    assert found.unknown == 3
    far_apart = Vocabulary(2, np.array([-5, 2**63 - 1])).rows(np.array([2**63 - 1, -5, 0]))
    assert far_apart.rows.tolist() == [1, 0, 2]
    dense = Vocabulary(4).rows(np.array([0, 3, 4, -1]))
    assert (dense.rows.tolist(), dense.unknown) == ([0, 3, 4, 4], 2)
    assert Vocabulary(4).rows(np.empty(0, np.int64)).rows.size == 0


def test_features_that_are_missing_or_unknown_take_their_tables_last_row() -> None:
    three, five = ContextualFeature(name="a", cardinality=3), ContextualFeature(name="b", cardinality=5)
    rows = FeatureRows((three, five))
    assert rows.rows(np.array([2, 4])).tolist() == [2, 4 + 4]
    assert rows.rows(np.array([3, -1])).tolist() == [3, 4 + 5]
    assert rows.rows(np.array([1])).tolist() == [1, 4 + 5]
    assert rows.rows(np.array([1, 0, 9])).tolist() == [1, 4 + 0]
    assert FeatureRows(()).rows(np.array([7])).tolist() == []


def test_a_null_model_needs_no_weights(tmp_path: Path) -> None:
    config = small_config(family=Family.NULL)
    assert expected_tensors(config) == {}
    save_checkpoint(tmp_path, config, {})
    assert load_checkpoint(tmp_path).weights_bytes == 0


def test_a_null_model_written_over_a_real_one_leaves_no_weights_behind(tmp_path: Path) -> None:
    config = small_config()
    save_checkpoint(tmp_path, config, random_checkpoint(config, 0).tensors)
    save_checkpoint(tmp_path, small_config(family=Family.NULL), {})
    assert load_checkpoint(tmp_path).config.family is Family.NULL


def test_model_init_makes_a_checkpoint_that_model_show_describes(tmp_path: Path) -> None:
    items = tmp_path / "items.txt"
    items.write_text("30\n10\n20\n10\n")
    out = tmp_path / "model"
    made = CliRunner().invoke(
        app,
        f"init {out} --items {items} --dim 16 --layers 2 --heads 2 --max-prefix 64 "
        "--task click --task watch:regression --feature country=9",
    )
    assert made.exit_code == 0, made.output
    shown = CliRunner().invoke(app, ["show", str(out)])
    checkpoint = load_checkpoint(out)
    assert shown.exit_code == 0
    assert checkpoint.revision in shown.output
    assert "country (9)" in shown.output
    assert checkpoint.vocabulary().rows(np.array([10, 20, 30, 40])).rows.tolist() == [0, 1, 2, 3]
    again = CliRunner().invoke(app, ["init", str(out)])
    assert isinstance(again.exception, RelayError)


def test_model_init_fills_any_configuration_with_random_weights(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    config = small_config(family=Family.SOFTMAX, mlp_dim=8, max_attn_len=9, target_group_size=2)
    path.write_text(config.to_json())
    made = CliRunner().invoke(app, ["init", str(tmp_path / "a"), "--config", str(path), "--seed", "3"])
    assert made.exit_code == 0, made.output
    assert load_checkpoint(tmp_path / "a").revision == random_checkpoint(config, 3).revision
    assert "window of 9 places, candidates in groups of 2" in made.output
    both = CliRunner().invoke(app, ["init", str(tmp_path / "b"), "--config", str(path), "--layers", "3", "--null"])
    assert "--config defines the model: leave out --layers, --null" in str(both.exception)


def test_model_init_refuses_a_normalizer_of_zero(tmp_path: Path) -> None:
    made = CliRunner().invoke(app, ["init", str(tmp_path), "--normalizer", "0"])
    assert "normalizer: Input should be greater than 0" in str(made.exception)


def test_an_item_file_names_the_line_that_is_no_number(tmp_path: Path) -> None:
    path = tmp_path / "items.txt"
    path.write_text("1\n2\nthree\n")
    with pytest.raises(RelayError, match=r"line 3: 'three' is not an integer"):
        read_item_ids(path)
    path.write_text("")
    with pytest.raises(RelayError, match="contains no item id"):
        read_item_ids(path)
    np.save(tmp_path / "items.npy", np.array([3, 1, 3]))
    assert read_item_ids(tmp_path / "items.npy").tolist() == [1, 3]
    np.save(tmp_path / "floats.npy", np.array([0.5]))
    with pytest.raises(RelayError, match="float64"):
        read_item_ids(tmp_path / "floats.npy")


def test_an_id_beyond_64_bits_with_a_sign_is_refused_and_not_wrapped(tmp_path: Path) -> None:
    largest = 2**63 - 1
    np.save(tmp_path / "largest.npy", np.array([largest, 5], np.uint64))
    assert read_item_ids(tmp_path / "largest.npy").tolist() == [5, largest]
    np.save(tmp_path / "larger.npy", np.array([5, largest + 1], np.uint64))
    with pytest.raises(RelayError, match=f"contains the id {largest + 1}"):
        read_item_ids(tmp_path / "larger.npy")


@pytest.mark.parametrize("moment", ["before the weights", "between both files"])
def test_a_save_that_is_interrupted_leaves_the_old_or_the_new_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """The new weights under the old configuration had the right shapes, and scored wrongly."""
    old, new = small_config(normalizer=100.0), small_config(normalizer=50.0)
    before = save_checkpoint(tmp_path, old, random_checkpoint(old, 0).tensors)
    tensors = random_checkpoint(new, 1).tensors
    replace_file, names = Path.replace, {"before the weights": WEIGHTS_FILE, "between both files": CONFIG_FILE}

    def die(source: Path, target: Path) -> Path:
        if target.name == names[moment]:
            raise KeyboardInterrupt
        return replace_file(source, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", die)
        with pytest.raises(KeyboardInterrupt):
            save_checkpoint(tmp_path, new, tensors)
    loaded = load_checkpoint(tmp_path)
    if moment == "before the weights":
        assert (loaded.revision, loaded.config) == (before.revision, old)
    else:
        assert (loaded.revision, loaded.config) == (compute_revision(new, tensors), new)
    assert verify_checkpoint(tmp_path, trust=False).changed == ()
    after = save_checkpoint(tmp_path, new, tensors)
    assert load_checkpoint(tmp_path).revision == after.revision
    assert sorted(path.name for path in tmp_path.iterdir()) == [CONFIG_FILE, WEIGHTS_FILE]


@pytest.mark.parametrize("dimension", [64, 512])
def test_a_full_disk_leaves_the_checkpoint_that_was_there_and_no_part_of_another(
    small_disk: Path, dimension: int
) -> None:
    """One that fits beside no other, and one that fits nowhere; then a folder that is new."""
    old = small_config()
    before = save_checkpoint(small_disk / "model", old, random_checkpoint(old, 0).tensors)
    larger = small_config(vocabulary_size=20_000, embedding_dim=dimension)
    tensors = random_checkpoint(larger, 1).tensors
    filler = small_disk / "filler"
    filler.write_bytes(bytes(4 << 20))
    for folder in ("model", "new"):
        with pytest.raises(RelayError, match="cannot be written"):
            save_checkpoint(small_disk / folder, larger, tensors)
    assert sorted(path.name for path in (small_disk / "model").iterdir()) == [CONFIG_FILE, WEIGHTS_FILE]
    assert list((small_disk / "new").iterdir()) == []
    assert load_checkpoint(small_disk / "model").revision == before.revision


def test_a_link_is_resolved_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The configuration of one revision was joined with the weights of the other."""
    saved = []
    for name, normalizer in (("first", 100.0), ("second", 50.0)):
        config = small_config(normalizer=normalizer)
        saved.append(save_checkpoint(tmp_path / name, config, random_checkpoint(config, len(saved)).tensors))
    link = tmp_path / "current"
    link.symlink_to("first")

    def read_and_point(folder: Path) -> ModelConfig:
        found = read_config(folder)
        link.unlink()
        link.symlink_to("second")
        return found

    monkeypatch.setattr("relaygr.worker.model.checkpoint.read_config", read_and_point)
    loaded = load_checkpoint(link)
    assert (loaded.revision, loaded.config) == (saved[0].revision, saved[0].config)
    assert load_checkpoint(link).revision == saved[1].revision


@pytest.mark.parametrize("named", ["both files", "the weights"])
@pytest.mark.parametrize("moment", ["config", "weights"])
def test_a_save_into_the_folder_that_is_read_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str, moment: str
) -> None:
    old, new = small_config(normalizer=100.0), small_config(normalizer=50.0)
    save_checkpoint(tmp_path, old, random_checkpoint(old, 0).tensors)
    module = "relaygr.worker.model.checkpoint"
    name = f"{module}.{'read_config' if moment == 'config' else '_read'}"
    real = {"config": read_config, "weights": checkpoint_module._read}[moment]

    def save_meanwhile(path: Path) -> Any:
        monkeypatch.setattr(name, real)
        found = real(path)  # type: ignore[operator]
        with monkeypatch.context() as patched, contextlib.suppress(KeyboardInterrupt):
            if named == "the weights":
                patched.setattr(Path, "replace", die_at_the_configuration)
            save_checkpoint(tmp_path, new, random_checkpoint(new, 1).tensors)
        return found

    replace_file = Path.replace

    def die_at_the_configuration(source: Path, target: Path) -> Path:
        if target.name == CONFIG_FILE:
            raise KeyboardInterrupt
        return replace_file(source, target)

    monkeypatch.setattr(name, save_meanwhile)
    with pytest.raises(RelayError, match="was replaced while it was read"):
        load_checkpoint(tmp_path)
    assert load_checkpoint(tmp_path).config == new


@pytest.mark.parametrize(
    "record",
    [
        "[" * 70_000,
        '{"time_s": -1e400, "digests": {}}',
        '{"time_s": Infinity, "digests": {}}',
        '{"digests": ' + "{}" * 9,
    ],
    ids=["lists in lists", "a number without end", "infinity", "no JSON"],
)
def test_a_record_in_the_header_that_is_no_record_is_refused(tmp_path: Path, record: str) -> None:
    save_checkpoint(tmp_path, (config := small_config()), random_checkpoint(config, seed=1).tensors)
    save_file(load_file(tmp_path / WEIGHTS_FILE), tmp_path / WEIGHTS_FILE, {"relaygr": record})
    with pytest.raises(RelayError, match="has a broken record of its digests"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize("names", ['{"buy": 1e999}', "[" * 70_000], ids=["a number without end", "lists in lists"])
def test_names_of_actions_that_are_no_codes_are_refused(tmp_path: Path, names: str) -> None:
    (tmp_path / ACTIONS_FILE).write_text(names)
    with pytest.raises(RelayError, match="is no object of event names and codes"):
        read_action_names(tmp_path)
