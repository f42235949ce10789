"""NVIDIA's state dict in its three layouts: after conversion the engine's scores equal those of the source."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from relaygr.runtime.errors import RelayError
from relaygr.schemas.messages import Behaviours
from relaygr.worker.model.convert.conversion import convert_state_dict
from relaygr.worker.model.convert.options import ConvertOptions, ProjectionLayout, SourceFeature, SourceKind
from relaygr.worker.model.convert.parts import Table
from relaygr.worker.model.convert.state_dict import StateDict
from relaygr.worker.model.options import Task
from tests.worlds.converted import Nvidia, Tensors, load, make_nvidia

COLLECTION = "_embedding_collection._data_parallel_embedding_collection.embeddings."
CANDIDATES = np.array([3, 19, 3, 0])


def options_of(**changes: Any) -> ConvertOptions:
    values: dict[str, Any] = {
        "heads": 2,
        "normalizer": 40.0,
        "tasks": (Task(name="click"), Task(name="like")),
        "features": (SourceFeature(name="region"),),
        "contextual_mask": False,
    }
    return ConvertOptions(**(values | changes))


def with_tables(source: Nvidia, layout: str) -> Tensors:
    w = source.weights
    tables = {"item": w["items"], "action": w["actions"], "region": w["region"]}
    found = {f"{COLLECTION}{name}.weight": torch.from_numpy(table) for name, table in tables.items()}
    return source.state_dict(layout) | found


def behaviours(count: int) -> Behaviours:
    random = np.random.default_rng(1)
    return Behaviours(random.integers(0, 20, count), random.integers(0, 4, count).astype(np.uint16), np.arange(count))


def largest_error(ours: Any, theirs: Any) -> float:
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


@pytest.mark.parametrize("with_mlps", [False, True])
@pytest.mark.parametrize(("page_tokens", "chunk_tokens"), [(4, 3), (64, 512)])
@pytest.mark.parametrize("layout", ["fused", "native", "inference"])
def test_the_engine_scores_what_the_source_scores(
    layout: str, page_tokens: int, chunk_tokens: int, with_mlps: bool
) -> None:
    source = make_nvidia(with_mlps)
    projection = ProjectionLayout.CONTIGUOUS if layout == "inference" else None
    state = StateDict(with_tables(source, layout))
    world = load(
        convert_state_dict(state, SourceKind.NVIDIA, options_of(projection=projection), "here"),
        page_tokens,
        chunk_tokens,
    )
    history = behaviours(11)
    expected = source.scores([2], history, CANDIDATES)
    assert largest_error(world.scores([2], history, CANDIDATES), expected) <= 2e-5
    assert largest_error(world.scores([2], history, CANDIDATES, suffix=4), expected) <= 2e-5


def test_per_head_columns_read_as_contiguous_are_another_model() -> None:
    source = make_nvidia()
    state = StateDict(with_tables(source, "native"))
    options = options_of(projection=ProjectionLayout.CONTIGUOUS)
    world = load(convert_state_dict(state, SourceKind.NVIDIA, options, "here"), 4, 512)
    history = behaviours(11)
    assert largest_error(world.scores([2], history, CANDIDATES), source.scores([2], history, CANDIDATES)) > 1e-3


def test_a_layout_that_names_do_not_show_needs_an_option() -> None:
    state = StateDict(with_tables(make_nvidia(), "inference"))
    with pytest.raises(RelayError, match="--projection"):
        convert_state_dict(state, SourceKind.NVIDIA, options_of(), "here")


def test_tables_that_lie_in_one_flat_tensor_are_cut_by_their_rows() -> None:
    source = make_nvidia()
    w = source.weights
    flat = np.concatenate((w["items"], w["actions"], w["region"])).reshape(-1)
    state = source.state_dict("fused") | {f"{COLLECTION}item/action/region_weights": torch.from_numpy(flat)}
    with pytest.raises(RelayError, match="--table-rows item=ROWS"):
        convert_state_dict(StateDict(state), SourceKind.NVIDIA, options_of(), "here")
    options = options_of(table_rows={"item": 20, "action": 4})
    world = load(convert_state_dict(StateDict(state), SourceKind.NVIDIA, options, "here"), 4, 3)
    history = behaviours(6)
    assert largest_error(world.scores([0], history, CANDIDATES), source.scores([0], history, CANDIDATES)) <= 2e-5


def test_tables_from_files_with_ids_of_their_own(tmp_path: Path) -> None:
    source = make_nvidia()
    ids = np.random.default_rng(2).permutation(1000)[:20].astype(np.int64)
    np.save(tmp_path / "ids.npy", ids)
    np.save(tmp_path / "items.npy", source.weights["items"])
    state = {name: t for name, t in with_tables(source, "fused").items() if not name.endswith(".item.weight")}
    options = options_of(items=tmp_path / "ids.npy", tables={"item": str(tmp_path / "items.npy")})
    world = load(convert_state_dict(StateDict(state), SourceKind.NVIDIA, options, "here"), 4, 3)
    history = behaviours(6)
    known = Behaviours(ids[history.items], history.actions, history.timestamps_ms)
    expected = source.scores([0], history, CANDIDATES)
    assert largest_error(world.scores([0], known, ids[CANDIDATES]), expected) <= 2e-5


@pytest.mark.parametrize("largest", [2**63, 2**64 - 1])
def test_an_item_id_above_the_largest_of_messages_is_refused(tmp_path: Path, largest: int) -> None:
    """It became negative, another item's id for every gateway."""
    source = make_nvidia()
    ids = np.append(np.arange(19, dtype=np.uint64), np.uint64(largest))
    np.save(tmp_path / "ids.npy", ids)
    options = options_of(items=tmp_path / "ids.npy")
    state = StateDict(with_tables(source, "fused"))
    with pytest.raises(RelayError, match=f"contains the id {largest}"):
        convert_state_dict(state, SourceKind.NVIDIA, options, "here")
    np.save(tmp_path / "ids.npy", np.append(ids[:19], np.uint64(2**63 - 1)))
    made = convert_state_dict(state, SourceKind.NVIDIA, options, "here")
    assert made.tensors["items.ids"][-1] == 2**63 - 1


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint64, torch.uint32])
def test_keys_of_a_feature_may_be_unsigned(dtype: torch.dtype) -> None:
    table = Table("features", torch.ones(2, 4), torch.tensor([0, 3], dtype=dtype), "keys")
    assert table.dense("country").rows.sum(1).tolist() == [4, 0, 0, 4]


def test_unsigned_keys_of_a_feature_that_are_ids_are_refused() -> None:
    table = Table("features", torch.ones(2, 4), torch.tensor([0, 2**64 - 1], dtype=torch.uint64), "keys")
    with pytest.raises(RelayError, match=f"2 keys from 0 to {2**64 - 1}"):
        table.dense("country")


def test_a_table_of_text_is_refused_in_a_sentence(tmp_path: Path) -> None:
    np.save(tmp_path / "items.npy", np.array([["a", "b"]]))
    options = options_of(tables={"item": str(tmp_path / "items.npy")})
    with pytest.raises(RelayError, match="the options do not fit it: could not convert string"):
        convert_state_dict(StateDict(with_tables(make_nvidia(), "fused")), SourceKind.NVIDIA, options, "here")


def test_tensors_for_training_only_are_not_left_over() -> None:
    state = with_tables(make_nvidia(), "native")
    state["_hstu_block._attention_layers.0._linear_uvqk._extra_state"] = torch.zeros(4)
    source = StateDict(state, ("_hstu_block._attention_layers.1._linear_uvqk._extra_state",))
    report = convert_state_dict(source, SourceKind.NVIDIA, options_of(), "here").report
    assert report.is_complete
    assert len([unused for unused in report.unused if unused.source.endswith("_extra_state")]) == 2


def test_norms_and_biases_that_the_source_lacks_become_neutral() -> None:
    source = make_nvidia()
    for layer in source.layers:
        for name in ("b1", "beta", "b2"):
            layer[name][:] = 0
        layer["g1"][:] = layer["g2"][:] = 1
    for index in range(2):
        source.weights[f"head.{index}.bias"][:] = 0
    gone = ("layernorm_weight", "layernorm_bias", "ln_dropout_mul.weight", "ln_dropout_mul.bias", "_linear_uvqk.bias")
    state = {
        name: tensor
        for name, tensor in with_tables(source, "native").items()
        if not name.endswith(gone) and not (name.startswith("_mlp.") and name.endswith(".bias"))
    }
    with pytest.raises(RelayError, match="--projection"):
        convert_state_dict(StateDict(state), SourceKind.NVIDIA, options_of(), "here")
    options = options_of(projection=ProjectionLayout.PER_HEAD)
    world = load(convert_state_dict(StateDict(state), SourceKind.NVIDIA, options, "here"), 4, 3)
    history = behaviours(7)
    assert largest_error(world.scores([1], history, CANDIDATES), source.scores([1], history, CANDIDATES)) <= 2e-5


def test_a_model_without_actions_is_a_sequence_of_items() -> None:
    state = {name: tensor for name, tensor in with_tables(make_nvidia(), "fused").items() if ".action." not in name}
    converted = convert_state_dict(StateDict(state), SourceKind.NVIDIA, options_of(), "here")
    assert converted.report.is_complete
    assert converted.config.layout().tokens_per_behaviour == 1
    assert converted.config.num_actions == 0


def test_whether_contextual_tokens_see_the_history_must_be_told() -> None:
    values = options_of().model_dump(exclude_unset=True)
    del values["contextual_mask"]
    source = StateDict(with_tables(make_nvidia(), "fused"))
    with pytest.raises(RelayError, match="--contextual-mask \\(or --no-contextual-mask"):
        convert_state_dict(source, SourceKind.NVIDIA, ConvertOptions(**values), "here")
