"""Checkpoint folders as training loops save them: every layout converts to what the plain state dict converts to."""

from __future__ import annotations

import io
import pickle
import sys
import tracemalloc
from pathlib import Path, PosixPath
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint import metadata

from relaygr.runtime.errors import RelayError
from relaygr.worker.model.checkpoint import compute_revision
from relaygr.worker.model.convert.conversion import Converted, convert, convert_state_dict
from relaygr.worker.model.convert.options import ConvertOptions, SourceFeature, SourceKind
from relaygr.worker.model.convert.state_dict import StateDict, read_state_dict
from relaygr.worker.model.options import Task, TaskKind
from tests.workers.test_convert_nvidia import options_of as nvidia_options
from tests.workers.test_convert_nvidia import with_tables
from tests.workers.test_convert_research import options_of as research_options
from tests.workers.test_convert_research import source_of
from tests.workers.vector_models import make_dlrm
from tests.worlds.converted import Tensors, dlrm_state_dict, make_nvidia
from tests.worlds.distributed import save_distributed, save_dynamic_table
from tests.worlds.torch_files import rewrite_pickle

META_OPTIONS = ConvertOptions(
    heads=2,
    normalizer=40.0,
    tasks=(Task(name="click"), Task(name="watch", kind=TaskKind.REGRESSION)),
    features=(SourceFeature(name="user_id", min_tokens=0), SourceFeature(name="region", min_tokens=0)),
)
COLLECTION = "_embedding_collection._data_parallel_embedding_collection.embeddings."


class OptimizerState:
    """Stands for a class of the training loop, which this machine does not have."""

    def __init__(self) -> None:
        self.momentum = torch.zeros(3)


def revision(converted: Converted) -> str:
    assert converted.report.is_complete, converted.report
    return compute_revision(converted.config, converted.tensors)


def meta_folder(folder: Path, source: Tensors, ranks: int = 3) -> None:
    """As `save_dmp_checkpoint` of generative-recommenders."""
    tables = {name: tensor for name, tensor in source.items() if "embeddings." in name}
    save_distributed(folder / "sparse", {f"sparse_dict.{name}": table for name, table in tables.items()}, {}, ranks)
    torch.save(
        {
            "dense_dict": {name: tensor for name, tensor in source.items() if name not in tables},
            "optimizer_dict": {"state": {}, "param_groups": []},
            "class_metrics": {"train": [{"auc": torch.zeros(2)}], "eval": []},
            "reg_metrics": {"train": [], "eval": []},
            "global_step": {"train": 3, "eval": 1},
            "sparse_tensor_keys": set(tables),
        },
        folder / "non_sparse.ckpt",
    )


def test_metas_folder_with_the_tables_over_three_ranks(tmp_path: Path) -> None:
    source = dlrm_state_dict(make_dlrm())
    meta_folder(tmp_path, source)
    assert len(list((tmp_path / "sparse").glob("*.distcp"))) == 3
    expected = convert_state_dict(StateDict(source), SourceKind.META, META_OPTIONS, "here")
    assert revision(convert(tmp_path, SourceKind.META, META_OPTIONS)) == revision(expected)


def test_large_tables_are_made_in_files_that_leave_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = dlrm_state_dict(make_dlrm())
    (tmp_path / "scratch").mkdir()
    meta_folder(tmp_path / "source", source)
    expected = convert_state_dict(StateDict(source), SourceKind.META, META_OPTIONS, "here")
    monkeypatch.setattr("relaygr.worker.model.convert.distributed._MAPPED_BYTES", 0)
    converted = convert(tmp_path / "source", SourceKind.META, META_OPTIONS, scratch=tmp_path / "scratch")
    if sys.platform == "linux":
        assert str(tmp_path / "scratch") in Path("/proc/self/maps").read_text()
    assert revision(converted) == revision(expected)
    assert not list((tmp_path / "scratch").iterdir())


def test_half_precision_shards_keep_their_type(tmp_path: Path) -> None:
    save_distributed(tmp_path, {"table": torch.ones(5, 2, dtype=torch.bfloat16)}, {"step": 7}, ranks=2)
    found = read_state_dict(tmp_path)
    assert found.tensors["table"].dtype is torch.bfloat16
    assert found.others == ("step",)


def test_a_folder_that_lacks_a_rank_is_refused(tmp_path: Path) -> None:
    meta_folder(tmp_path, dlrm_state_dict(make_dlrm()))
    (tmp_path / "sparse" / "__1_0.distcp").unlink()
    with pytest.raises(RelayError, match=r"lacks __1_0\.distcp: copy the files of all ranks"):
        read_state_dict(tmp_path)


def changed_index(folder: Path, change: Any) -> None:
    index = pickle.loads((folder / ".metadata").read_bytes())
    change(index)
    (folder / ".metadata").write_bytes(pickle.dumps(index))


def larger(index: Any) -> None:
    entry = index.state_dict_metadata["table"]
    entry.size = entry.chunks[0].sizes = torch.Size([2**34, 4])
    del entry.chunks[1:]


def with_a_hole(index: Any) -> None:
    del index.state_dict_metadata["table"].chunks[1]


def compressed(index: Any) -> None:
    next(iter(index.storage_data.values())).transform_descriptors = ["stream.zstd/1"]


def repeated(index: Any) -> None:
    """The same part of a file for very many names."""
    found = next(iter(index.storage_data.values()))
    index.storage_data |= {metadata.MetadataIndex(str(number)): found for number in range(1000)}


def outside(index: Any) -> None:
    next(iter(index.storage_data.values())).relative_path = "../other.distcp"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (larger, "claim to hold 274,877,906,944"),
        (with_a_hole, r"does not hold all of table \[6, 4\]: shards are missing"),
        (compressed, "its shards are compressed or changed otherwise"),
        (repeated, "its index names the same part of a file many times"),
        (outside, r"names \.\./other\.distcp, which is not a file of this folder"),
    ],
)
def test_an_index_that_does_not_fit_its_shards_is_refused(tmp_path: Path, change: Any, sentence: str) -> None:
    save_distributed(tmp_path, {"table": torch.ones(6, 4)}, {}, ranks=2)
    changed_index(tmp_path, change)
    with pytest.raises(RelayError, match=sentence):
        read_state_dict(tmp_path)


class Trap:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self._path,)


def test_no_code_in_an_index_runs(tmp_path: Path) -> None:
    save_distributed(tmp_path, {"table": torch.ones(6, 4)}, {}, ranks=2)
    changed_index(tmp_path, lambda index: setattr(index, "planner_data", Trap(tmp_path / "sprung")))
    assert read_state_dict(tmp_path).tensors["table"].sum() == 24
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Trap(tmp_path / "sprung")))
    with pytest.raises(RelayError, match="is not the index of a distributed checkpoint"):
        read_state_dict(tmp_path)
    assert not (tmp_path / "sprung").exists()


def give_state(target: object, state: dict[str, object]) -> bytes:
    """A pickle that sets attributes of `target`, which may be a class."""
    parts = [pickle.dumps(each, protocol=2)[2:-1] for each in (target, (None, state))]
    return b"\x80\x02" + b"".join(parts) + pickle.BUILD + pickle.STOP


NESTED = pickle.EMPTY_TUPLE + b"".join(pickle.BINPUT + b"\0" + pickle.BINGET + b"\0" + pickle.TUPLE2 for _ in range(60))
"""A tuple of two tuples of two tuples, and so on: a hash of it reads 2**60 tuples."""


@pytest.mark.parametrize(
    "operations",
    [
        pickle.EMPTY_DICT + NESTED + pickle.NONE + pickle.SETITEM,
        pickle.MARK + NESTED + pickle.NONE + pickle.DICT,
        pickle.EMPTY_SET + pickle.MARK + NESTED + pickle.ADDITEMS,
        pickle.MARK + NESTED + pickle.FROZENSET,
        pickle.EMPTY_DICT
        + pickle.GLOBAL + b"torch.distributed.checkpoint.metadata\nMetadataIndex\n" + pickle.NONE + pickle.NONE
        + NESTED + pickle.TUPLE3 + pickle.REDUCE + pickle.NONE + pickle.SETITEM,
        pickle.EMPTY_DICT
        + pickle.dumps(metadata.MetadataIndex("table"), protocol=2)[2:-1]
        + pickle.dumps("offset", protocol=4)[11:-1].join([pickle.NONE + pickle.EMPTY_DICT, NESTED])
        + pickle.SETITEM + pickle.TUPLE2 + pickle.BUILD + pickle.NONE + pickle.SETITEM,
    ],
    ids=["dict entry", "dict", "set", "frozenset", "argument of a key", "attribute of a key"],
)  # fmt: skip
def test_an_index_with_a_key_of_nested_tuples_is_refused(tmp_path: Path, operations: bytes) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.PROTO + b"\x04" + operations + pickle.STOP)
    with pytest.raises(RelayError, match=r"cannot be read as the index .* tuple of tuples"):
        read_state_dict(tmp_path)


def test_bytes_that_an_index_claims_take_no_memory(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.PROTO + b"\x05" + pickle.BYTEARRAY8 + (2**28).to_bytes(8, "little"))
    tracemalloc.start()
    try:
        with pytest.raises(RelayError, match="cannot be read as the index"):
            read_state_dict(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()


def test_an_index_that_makes_many_objects_of_one_is_refused(tmp_path: Path) -> None:
    size = pickle.GLOBAL + b"torch\nSize\n" + pickle.BINGET + b"\0" + pickle.TUPLE1 + pickle.REDUCE
    one = pickle.MARK + (pickle.BININT1 + b"\1") * 10_000 + pickle.TUPLE + pickle.BINPUT + b"\0" + pickle.POP
    many = pickle.EMPTY_LIST + pickle.MARK + size * 100 + pickle.APPENDS
    (tmp_path / ".metadata").write_bytes(pickle.PROTO + b"\x04" + one + many + pickle.STOP)
    with pytest.raises(RelayError, match=r"cannot be read as the index .* objects that are larger than the file"):
        read_state_dict(tmp_path)


def test_a_shard_with_a_large_object_is_refused(tmp_path: Path) -> None:
    save_distributed(tmp_path, {"table": torch.ones(6, 4)}, {}, ranks=2)
    calls = pickle.GLOBAL + b"builtins\nbytearray\n" + pickle.LONG1 + b"\x09" + (2**62).to_bytes(9, "little")
    content = pickle.PROTO + b"\x02" + calls + pickle.TUPLE1 + pickle.REDUCE + pickle.STOP
    rewrite_pickle(tmp_path / "hostile", content)
    hostile = (tmp_path / "hostile").read_bytes()
    shard = tmp_path / "__0_0.distcp"
    offset = shard.stat().st_size
    shard.write_bytes(shard.read_bytes() + hostile)

    def to_the_hostile_part(index: Any) -> None:
        own = next(info for info in index.storage_data.values() if info.relative_path == shard.name)
        own.offset, own.length = offset, len(hostile)

    changed_index(tmp_path, to_the_hostile_part)
    with pytest.raises(RelayError, match="cannot be read as a distributed checkpoint: it calls bytearray"):
        read_state_dict(tmp_path)


@pytest.mark.parametrize("target", [metadata.Metadata, torch.serialization._get_layout, PosixPath("/etc/hostname")])
def test_an_index_changes_no_class_and_no_path(tmp_path: Path, target: object) -> None:
    """A state given to a class stayed in the process, and a path could show another name than the one that is read."""
    (tmp_path / ".metadata").write_bytes(give_state(target, {"_str": "__0_0.distcp"}))
    with pytest.raises(RelayError, match=r"cannot be read as the index .* gives a state to an object of"):
        read_state_dict(tmp_path)
    assert not hasattr(metadata.Metadata, "_str")


def path_for_name(index: Any) -> None:
    next(iter(index.storage_data.values())).relative_path = PosixPath("__0_0.distcp")


def size_for_type(index: Any) -> None:
    index.state_dict_metadata["table"].properties.dtype = torch.Size([1])


def negative(index: Any) -> None:
    index.state_dict_metadata["table"].size = torch.Size([-6, -4])


@pytest.mark.parametrize("change", [path_for_name, size_for_type, negative])
def test_an_index_with_other_objects_in_place_of_names_types_and_sizes_is_refused(tmp_path: Path, change: Any) -> None:
    save_distributed(tmp_path, {"table": torch.ones(6, 4)}, {}, ranks=2)
    changed_index(tmp_path, change)
    with pytest.raises(RelayError, match="does not describe tensors"):
        read_state_dict(tmp_path)


def test_the_research_codes_file_without_an_extension(tmp_path: Path) -> None:
    source, _ = source_of(concat_ua=False)
    own = {name: source.pop(name) for name in list(source) if name.startswith("readout")}
    name = "HSTU-b2-h2-dqk4-dv4-lsilud0.2-ad0.0_DotProduct_local-l200_ep100"
    model = {f"module.{name}": tensor for name, tensor in source.items()}
    torch.save({"epoch": 100, "model_state_dict": model, "optimizer_state_dict": {"state": {}}}, tmp_path / name)
    assert set(read_state_dict(tmp_path / name).tensors) == set(source)
    torch.save(own, tmp_path / "readout.pt")
    expected = convert_state_dict(StateDict(source | own), SourceKind.RESEARCH, research_options(), "here")
    assert revision(convert(tmp_path, SourceKind.RESEARCH, research_options())) == revision(expected)


def nvidia_folder(folder: Path, state: dict[str, Any], ranks: int = 2) -> None:
    """As `commons.checkpoint.save` of recsys-examples: a file for each rank, the same without tensor parallelism."""
    (folder / "torch_module").mkdir()
    for rank in range(ranks):
        saved = {"model_state_dict": state, "optimizer_state_dict": OptimizerState()}
        torch.save(saved, folder / "torch_module" / f"model.{rank}.pth")


def test_nvidias_folder_with_dynamic_tables(tmp_path: Path) -> None:
    """Keys in the order of a hash table. Values of a feature that have no key take the row of unknown values, zeros."""
    source = make_nvidia()
    state: dict[str, Any] = with_tables(source, "native")
    items, region = (state.pop(f"{COLLECTION}{name}.weight") for name in ("item", "region"))
    state["_hstu_block._attention_layers.0._linear_uvqk._extra_state"] = io.BytesIO(b"library")
    nvidia_folder(tmp_path, state)
    tables = tmp_path / "dynamicemb_module" / "model._embedding_collection._model_parallel_embedding_collection"
    order = torch.from_numpy(np.random.default_rng(3).permutation(20))
    save_dynamic_table(tables, "item", 1000 + order * 7, items[order], ranks=2)
    save_dynamic_table(tables, "region", torch.tensor([2, 0]), region[[2, 0]], ranks=1)
    converted = convert(tmp_path, SourceKind.NVIDIA, nvidia_options())
    plain: Tensors = {name: tensor for name, tensor in state.items() if isinstance(tensor, torch.Tensor)}
    region[1] = 0
    plain |= {f"{COLLECTION}item.weight": items, f"{COLLECTION}region.weight": region}
    expected = convert_state_dict(StateDict(plain), SourceKind.NVIDIA, nvidia_options(), "here")
    ids = {"items.ids": 1000 + torch.arange(20) * 7}
    assert revision(converted) == compute_revision(expected.config, {**expected.tensors, **ids})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("table", ["item", "region"])
def test_a_dynamic_table_in_half_precision_is_refused(tmp_path: Path, table: str, dtype: torch.dtype) -> None:
    """The conversion succeeded with a table of half the width, and the error named the file that was not written."""
    state: dict[str, Any] = with_tables(make_nvidia(), "native")
    rows = state.pop(f"{COLLECTION}{table}.weight")
    nvidia_folder(tmp_path, state)
    halves = rows.to(dtype).contiguous().view(torch.float32)
    save_dynamic_table(tmp_path / "dynamicemb_module", table, torch.arange(len(rows)), halves, ranks=1)
    with pytest.raises(RelayError, match=rf"The table for '{table}' has width 4, not 8\. A dump in bfloat16"):
        convert(tmp_path, SourceKind.NVIDIA, nvidia_options())


def test_a_table_of_bfloat16_in_an_npy_file_is_refused(tmp_path: Path) -> None:
    state: dict[str, Any] = with_tables(make_nvidia(), "native")
    rows = state.pop(f"{COLLECTION}item.weight").to(torch.bfloat16)
    nvidia_folder(tmp_path, state)
    np.save(tmp_path / "items.npy", rows.view(torch.uint16).numpy().view("V2"))
    with pytest.raises(RelayError, match=r"contains \|V2, as numpy writes bfloat16"):
        convert(tmp_path, SourceKind.NVIDIA, nvidia_options(tables={"item": str(tmp_path / "items.npy")}))


def test_ranks_of_tensor_parallel_training_are_refused(tmp_path: Path) -> None:
    state = with_tables(make_nvidia(), "native")
    nvidia_folder(tmp_path, state)
    other = {name: tensor + 1 for name, tensor in state.items()}
    torch.save({"model_state_dict": other}, tmp_path / "torch_module" / "model.1.pth")
    with pytest.raises(RelayError, match="tensor parallelism"):
        read_state_dict(tmp_path)


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        (torch.tensor([5, 2**40]), "2 keys from 5 to 1099511627776, but values of a feature are numbered from 0"),
        (torch.tensor([-1, 3]), "keys from -1"),
    ],
)
def test_a_dynamic_table_of_hashed_feature_values_is_refused(tmp_path: Path, keys: torch.Tensor, sentence: str) -> None:
    state = with_tables(make_nvidia(), "native")
    region = state.pop(f"{COLLECTION}region.weight")
    nvidia_folder(tmp_path, state)
    save_dynamic_table(tmp_path / "dynamicemb_module", "region", keys, region[:2], ranks=1)
    with pytest.raises(RelayError, match=sentence):
        convert(tmp_path, SourceKind.NVIDIA, nvidia_options())


def test_a_dynamic_table_that_lacks_a_rank_or_rows_is_refused(tmp_path: Path) -> None:
    keys, rows = torch.arange(6), torch.ones(6, 4)
    tables = tmp_path / "dynamicemb_module"
    save_dynamic_table(tables, "item", keys, rows, ranks=2)
    values = tables / "item_emb_values.rank_1.world_size_2"
    values.write_bytes(values.read_bytes()[:-4])
    with pytest.raises(RelayError, match="11 numbers, which are not rows of 3 keys"):
        read_state_dict(tmp_path)
    (tables / "item_emb_keys.rank_1.world_size_2").unlink()
    with pytest.raises(RelayError, match="does not hold the files of all 2 ranks of item"):
        read_state_dict(tmp_path)
