"""`relaygr model convert`: files in, a checkpoint and a report out, and an exit code that scripts can trust."""

from __future__ import annotations

import json
import pickle
import tracemalloc
import zipfile
from collections import Counter, OrderedDict, deque
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
from relaygr.conversion_reference import reference
from relaygr.runtime.errors import RelayError
from relaygr.worker.model.checkpoint import load_checkpoint
from relaygr.worker.model.convert.options import ConvertOptions
from relaygr.worker.model.convert.state_dict import read_state_dict
from relaygr.worker.model.npy import read_npy, read_npz
from tests.workers.vector_models import make_dlrm
from tests.worlds.converted import Tensors, dlrm_state_dict
from tests.worlds.torch_files import archive, records, rewrite_pickle, with_two_directories

PAGE = Path(__file__).parents[2] / "docs" / "conversion.md"
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


def header_of(shape: str) -> bytes:
    text = f"{{'descr': '<i8', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + bytes(64)


@pytest.mark.parametrize(
    "header",
    [
        header_of(f"({2**63},)"),
        header_of(f"({2**64}, 2)"),
        header_of("(" + "9" * 5000 + ",)"),
        header_of("(" * 3000 + ")" * 3000),
        header_of("(" + "-" * 9000 + "1,)"),
        header_of("(1,\n"),
        header_of("(True,)"),
        header_of("(-1, -8)"),
        b"\x93NUMPY\x02\x00\xff\xff\xff\xff{}",
    ],
    ids=["2**63", "2**64", "digits", "brackets", "signs", "open", "truth", "negative", "length"],
)
def test_a_header_that_numpy_did_not_write_is_refused_in_a_sentence(tmp_path: Path, header: bytes) -> None:
    (tmp_path / "ids.npy").write_bytes(header)
    with zipfile.ZipFile(tmp_path / "requests.npz", "w") as archive:
        archive.writestr("items.npy", header)
    with pytest.raises(ValueError, match=r"^.{1,200}$"):
        read_npy(tmp_path / "ids.npy")
    with pytest.raises(ValueError, match=r"^.{1,200}$"):
        read_npz(tmp_path / "requests.npz")
    with pytest.raises(RelayError, match="cannot be read as item ids"):
        read_item_ids(tmp_path / "ids.npy")


@pytest.mark.slow
def test_an_archive_of_zeros_is_refused_and_a_compressed_one_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    np.savez_compressed(path, items=np.zeros(1000), lengths=np.zeros(3))
    assert {name: array.shape for name, array in read_npz(path).items()} == {"items": (1000,), "lengths": (3,)}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for number in range(257):
            archive.writestr(f"{number}.npy", bytes(2**22))
    with pytest.raises(ValueError, match="but claims to hold 1,077,"):
        read_npz(path)


def test_a_member_of_an_archive_that_is_no_array_is_refused_and_not_unpacked(tmp_path: Path) -> None:
    """The archive says 50 bytes, and the member has 64 MiB."""
    path = tmp_path / "a.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        archive.writestr("items.npy", bytes(2**26))
    content = bytearray(path.read_bytes())
    at = content.rindex(b"items.npy") - 46 + 24
    content[at : at + 4] = (50).to_bytes(4, "little")
    path.write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=r"magic string|CRC"):
            read_npz(path)
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()


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


def converted(path: Path) -> None:
    """A conversion of a tensor of one number, which torch would make while it reads."""
    made = function("torch", "_utils._rebuild_device_tensor_from_cpu_tensor") + pickle.MARK + CONVERTED + pickle.TUPLE
    content = pickle.PROTO + b"\x02" + pickle.EMPTY_DICT + text("w") + made + pickle.REDUCE + pickle.SETITEM
    rewrite_pickle(path, content + pickle.STOP)


@pytest.mark.parametrize(
    ("make", "fault"),
    [
        (repeated, "17,000,000,000 elements, but fewer are stored"),
        (compressed, "claims to hold 4,"),
        (shared, "because they share memory"),
        (sparse, "not a plain tensor"),
        (converted, "not a plain tensor"),
    ],
)
def test_a_small_file_that_claims_large_tensors_is_refused(
    tmp_path: Path, make: Callable[[Path], None], fault: str
) -> None:
    make(tmp_path / "model.pt")
    with pytest.raises(RelayError, match=rf"model\.pt (is refused|cannot be read as a state dict): .*{fault}"):
        read_state_dict(tmp_path / "model.pt")


def number(value: int) -> bytes:
    return pickle.LONG1 + b"\x09" + value.to_bytes(9, "little")


def function(module: str, name: str) -> bytes:
    return pickle.GLOBAL + f"{module}\n{name}\n".encode()


def text(value: str) -> bytes:
    return pickle.BINUNICODE + len(value).to_bytes(4, "little") + value.encode()


CALL = pickle.TUPLE1 + pickle.REDUCE
NESTED = pickle.EMPTY_TUPLE + b"".join(pickle.BINPUT + b"\0" + pickle.BINGET + b"\0" + pickle.TUPLE2 for _ in range(60))
"""A tuple of two tuples of two tuples, and so on: a hash of it reads 2**60 tuples."""
LARGE = 2**62
OBJECTS: dict[str, tuple[bytes, str]] = {
    "bytearray": (function("builtins", "bytearray") + number(LARGE) + CALL, "calls bytearray"),
    "bytearray by its old name": (function("__builtin__", "bytearray") + number(LARGE) + CALL, "calls bytearray"),
    "an object of bytearray": (
        function("builtins", "bytearray") + number(LARGE) + pickle.TUPLE1 + pickle.NEWOBJ,
        "calls bytearray",
    ),
    "a tensor of a size": (function("torch", "FloatTensor") + number(LARGE) + CALL, "calls FloatTensor"),
    "a tensor of a shape": (
        function("torch", "Tensor") + function("torch", "Size") + number(LARGE) + pickle.TUPLE1 + CALL + CALL,
        "calls Tensor",
    ),
    "a storage": (function("torch.storage", "UntypedStorage") + number(LARGE) + CALL, "calls UntypedStorage"),
    "a function called by torch": (
        function("torch._tensor", "_rebuild_from_type_v2") + pickle.MARK + function("builtins", "bytearray")
        + function("torch", "Tensor") + number(LARGE) + pickle.TUPLE1 + pickle.EMPTY_DICT + pickle.TUPLE
        + pickle.REDUCE,
        "calls _rebuild_from_type_v2",
    ),
    "bytes in hexadecimal": (
        function("_codecs", "encode") + text("a") + text("hex") + pickle.TUPLE2 + pickle.REDUCE, "calls encode"
    ),
    "a name of nested tuples": (pickle.EMPTY_DICT + NESTED + pickle.NONE + pickle.SETITEM, "tuple of tuples"),
    "names of nested tuples": (
        pickle.EMPTY_DICT + pickle.MARK + NESTED + pickle.NONE + pickle.SETITEMS, "tuple of tuples"
    ),
    "a set of nested tuples": (
        function("builtins", "set") + pickle.EMPTY_LIST + NESTED + pickle.APPEND + CALL, "tuple of tuples"
    ),
    "an ordered dict of nested tuples": (
        function("collections", "OrderedDict") + pickle.EMPTY_LIST + pickle.EMPTY_LIST + NESTED + pickle.APPEND
        + pickle.NONE + pickle.APPEND + pickle.APPEND + CALL,
        "tuple of tuples",
    ),
}  # fmt: skip


def ones(elements: int) -> bytes:
    """A tensor of one stored number, so many times."""
    storage = pickle.MARK + text("storage") + function("torch", "FloatStorage") + text("0") + text("cpu")
    storage += pickle.BININT1 + b"\x02" + pickle.TUPLE + pickle.BINPERSID
    hooks = function("collections", "OrderedDict") + pickle.EMPTY_TUPLE + pickle.REDUCE
    size = number(elements) + pickle.TUPLE1 + pickle.BININT1 + b"\x00" + pickle.TUPLE1
    arguments = storage + pickle.BININT1 + b"\x00" + size + pickle.NEWFALSE + hooks
    return function("torch._utils", "_rebuild_tensor_v2") + pickle.MARK + arguments + pickle.TUPLE + pickle.REDUCE


MANY = 2**31
ENCODED = function("_codecs", "encode") + pickle.BINGET + b"\x00" + text("latin1") + pickle.TUPLE2 + pickle.REDUCE
CONVERTED = ones(MANY) + function("torch", "float64") + text("cpu") + pickle.NEWFALSE
OBJECTS |= {
    "a function whose module ends earlier": (
        function("torch", "_tensor._rebuild_from_type_v2") + pickle.MARK + function("builtins", "bytearray")
        + function("torch", "Tensor") + number(LARGE) + pickle.TUPLE1 + pickle.EMPTY_DICT + pickle.TUPLE
        + pickle.REDUCE,
        "calls _rebuild_from_type_v2",
    ),
    "bytes of one text many times": (
        text("x" * 5000) + pickle.BINPUT + b"\x00" + pickle.EMPTY_LIST + pickle.MARK + ENCODED * 500 + pickle.APPENDS
        + pickle.TUPLE2,
        "objects that are larger than the file",
    ),
    "a set of the numbers of a tensor": (function("builtins", "set") + ones(MANY) + CALL, "calls set"),
    "a shape of a tensor": (function("torch", "Size") + ones(MANY) + CALL, "calls Size"),
    "a pair that is a tensor": (
        function("collections", "OrderedDict") + pickle.EMPTY_LIST + ones(MANY) + pickle.APPEND + CALL,
        "calls OrderedDict",
    ),
    "bytes as many as a tensor says": (function("builtins", "bytearray") + ones(1) + CALL, "calls bytearray"),
    "names with one hash": (
        pickle.EMPTY_DICT + pickle.MARK
        + b"".join(
            pickle.LONG1 + b"\x0a" + ((2**61 - 1) * (2**17 + each)).to_bytes(10, "little") + pickle.NONE
            for each in range(10_001)
        )
        + pickle.SETITEMS,
        "10,000 keys",
    ),
}  # fmt: skip


@pytest.mark.parametrize("is_legacy", [False, True], ids=["zip", "legacy"])
@pytest.mark.parametrize("name", OBJECTS)
def test_a_small_file_with_a_large_object_is_refused(tmp_path: Path, name: str, is_legacy: bool) -> None:
    """torch loads these with `weights_only`: it takes the memory, or never ends."""
    made, fault = OBJECTS[name]
    path = tmp_path / "model.pt"
    content = pickle.PROTO + b"\x02" + pickle.EMPTY_DICT + text("w") + made + pickle.SETITEM + pickle.STOP
    rewrite_pickle(path, content, is_legacy)
    with pytest.raises(RelayError, match=f"contains more than tensors.*{fault}"):
        read_state_dict(path)


LARGE_OBJECT = (
    pickle.PROTO + b"\x02" + pickle.EMPTY_DICT + text("w") + function("builtins", "bytearray") + number(LARGE) + CALL
    + pickle.SETITEM + pickle.STOP
)  # fmt: skip


def under_another_case(path: Path) -> None:
    found = {**records(), "data.pkl": LARGE_OBJECT}
    archive(path, {"Data.PKL" if name == "data.pkl" else name: content for name, content in found.items()})


def beside_a_harmless_one(path: Path) -> None:
    archive(path, {**records(), "dAtA.pkl": LARGE_OBJECT})


def before_a_harmless_one(path: Path) -> None:
    archive(path, {"DATA.pkl": LARGE_OBJECT, **records()})


def in_another_directory(path: Path) -> None:
    longer = LARGE_OBJECT[:-1] + text("x" * 500) + b"0" + pickle.STOP
    with_two_directories(path, shown=records(), read={**records(), "data.pkl": longer})
    with zipfile.ZipFile(path) as shown:
        assert shown.read("archive/data.pkl") == records()["data.pkl"]
    assert torch._C.PyTorchFileReader(str(path)).get_record("data.pkl") == longer


def behind_bytes_that_are_no_archive(path: Path) -> None:
    """torch takes it for the format before 1.6, and `zipfile` for an archive."""
    archive(path, records())
    legacy = path.with_name("legacy")
    rewrite_pickle(legacy, LARGE_OBJECT, is_legacy=True)
    path.write_bytes(legacy.read_bytes() + path.read_bytes())
    legacy.unlink()


@pytest.mark.parametrize(
    ("make", "fault"),
    [
        (under_another_case, "calls bytearray"),
        (beside_a_harmless_one, "has data.pkl more than once"),
        (before_a_harmless_one, "has data.pkl more than once"),
        (in_another_directory, "directory is not at its end"),
        (behind_bytes_that_are_no_archive, "calls bytearray"),
    ],
)
def test_the_pickle_that_is_checked_is_the_one_that_torch_reads(
    tmp_path: Path, make: Callable[[Path], None], fault: str
) -> None:
    make(tmp_path / "model.pt")
    refused = run(tmp_path / "model.pt", tmp_path / "out", *OPTIONS, *FEATURES)
    assert refused.exit_code == 1 and fault in " ".join(refused.output.split())
    assert not (tmp_path / "out").exists()


def test_an_archive_whose_names_are_in_another_case_is_read_as_torch_reads_it(tmp_path: Path) -> None:
    archive(tmp_path / "model.pt", {name.upper(): content for name, content in records().items()})
    assert read_state_dict(tmp_path / "model.pt").tensors["w"].tolist() == [0, 0]


@pytest.mark.parametrize("is_legacy", [False, True], ids=["zip", "legacy"])
def test_small_objects_of_a_training_loop_are_named_and_not_loaded(tmp_path: Path, is_legacy: bool) -> None:
    tagged = torch.zeros(3)
    tagged.tag = 5  # type: ignore[attr-defined]
    others = {
        "bytes": b"abc\xff", "array": bytearray(b"ab"), "set": {1, (2, 3)}, "counter": Counter("aab"),
        "shape": torch.Size([2]), "names": OrderedDict([((1, 2), 3)]), "complex": 1j, "type": torch.float16,
        "device": torch.device("cpu"),
    }  # fmt: skip
    found = {"x": torch.zeros(1), "weight": torch.nn.Parameter(torch.ones(2)), "tagged": tagged, **others}
    torch.save(found, tmp_path / "model.pt", _use_new_zipfile_serialization=not is_legacy)
    read = read_state_dict(tmp_path / "model.pt")
    assert (set(read.tensors), set(read.others)) == ({"x", "weight", "tagged"}, set(others))


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


def test_options_by_their_names_in_a_file_are_those_of_the_command_line(tmp_path: Path, source: Tensors) -> None:
    save_file(source, tmp_path / "model.safetensors")
    whole, named, stored = tmp_path / "whole", tmp_path / "named", tmp_path / "stored"
    assert run(tmp_path / "model.safetensors", whole, *OPTIONS, *NAMES, "--hide-below", "user_id=4").exit_code == 0
    values = {
        "heads": "2", "normalizer": "40", "tasks": "[click, watch:regression]", "features": "[user_id, region]",
        "hide_below": "user_id=4",
    }  # fmt: skip
    done = run(tmp_path / "model.safetensors", named, *(f"--option={name}={value}" for name, value in values.items()))
    assert done.exit_code == 0, done.output
    (tmp_path / "options.yaml").write_text("\n".join(f"{name}: {value}" for name, value in values.items()))
    assert run(tmp_path / "model.safetensors", stored, "--config", tmp_path / "options.yaml").exit_code == 0
    expected = (whole / "config.json").read_text()
    assert [(folder / "config.json").read_text() for folder in (named, stored)] == [expected, expected]


def test_hide_below_adds_to_the_limits_of_a_file() -> None:
    """It set those of the features that it does not name to 0."""
    described = [{"name": "user_id", "min_tokens": 9}, {"name": "region"}]
    options = ConvertOptions.model_validate({"features": described, "hide_below": {"region": 4}})
    assert [feature.min_tokens for feature in options.features] == [9, 4]
    assert not ConvertOptions.model_validate({"hide_below": ["none"]}).model_fields_set, "no source is told of features"


@pytest.mark.parametrize(
    ("told", "sentence"),
    [
        ("heads", "--option heads: write NAME=VALUE, such as heads=4"),
        ("headz=2", "headz: Extra inputs are not permitted"),
        ("normalizer=41", "--option normalizer is given twice"),
        ("heads=[2", "--option heads=[2 is not YAML"),
        ("heads=two", "heads: Input should be a valid integer"),
        ("tables=movie_id", "--table movie_id: write NAME=VALUE"),
        ("hide_below={planet: 4}", "--hide-below planet: there is no such --feature"),
        ("hide_below=[4]", "hide_below is no mapping of features to numbers of tokens"),
    ],
)
def test_a_wrong_option_by_its_name_is_refused(tmp_path: Path, source: Tensors, told: str, sentence: str) -> None:
    save_file(source, tmp_path / "model.safetensors")
    done = run(tmp_path / "model.safetensors", tmp_path / "out", *OPTIONS[2:], *NAMES, "--option", told)
    assert done.exit_code == 1
    assert sentence in " ".join(done.output.split())


def test_the_committed_page_is_what_the_options_generate() -> None:
    assert PAGE.read_text(encoding="utf-8") == reference(), (
        "run: python -m relaygr.conversion_reference > docs/conversion.md"
    )


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


@pytest.mark.parametrize("is_legacy", [False, True], ids=["zip", "legacy"])
@pytest.mark.parametrize(
    ("protocol", "other", "said"),
    [
        (4, 1, r"its pickle has protocol 4, and the one of torch\.save is 2"),
        (5, bytearray(b"x"), "its pickle has protocol 5, .*"),
        (2, deque([0.5, 0.25], maxlen=20), "it has a list of a class that is not loaded, such as a deque"),
    ],
)
def test_a_file_that_torch_reads_only_as_a_whole_is_refused_with_the_cause(
    tmp_path: Path, protocol: int, other: object, said: str, is_legacy: bool
) -> None:
    found = {"x": torch.zeros(1), "other": other}
    torch.save(found, tmp_path / "model.pt", pickle_protocol=protocol, _use_new_zipfile_serialization=not is_legacy)
    with pytest.raises(RelayError, match=rf"only tensors are loaded \({said}\): save its state dict as"):
        read_state_dict(tmp_path / "model.pt")


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


def test_a_pickle_of_one_object_is_named_by_the_class_of_the_object(tmp_path: Path) -> None:
    torch.save(Library(), tmp_path / "arguments.bin")
    with pytest.raises(RelayError, match=r"it holds tests\.cli\.test_model_convert\.Library, not names and tensors"):
        read_state_dict(tmp_path)


def test_other_weights_in_the_file_are_left_over_and_each_tensor_of_the_training_is_listed(tmp_path: Path) -> None:
    """The moving average may be the better model, and the first weights that a file names may be zeros."""
    weights = {"module.a": torch.zeros(2, 3), "module.b": torch.zeros(4)}
    average = {"a": torch.ones(2, 3), "b": torch.ones(4)}
    step = torch.tensor(5.0)
    training = {
        "ema": average, "optimizer": {"state": {7: {"step": step, "exp_avg": torch.zeros(4)}}, "again": [step]},
        "shadow": [torch.ones(6)], "metrics": {"auc": torch.tensor(0.7)}, "epoch": 3,
    }  # fmt: skip
    torch.save({"model_state_dict": weights, **training}, tmp_path / "last.pth")
    found = read_state_dict(tmp_path)
    assert (set(found.tensors), found.others) == ({"a", "b"}, ("epoch",))
    assert {each.name: each.shape for each in found.unread if each.is_other_weights} == {"ema.a": (2, 3), "ema.b": (4,)}
    assert {each.name: each.shape for each in found.unread if not each.is_other_weights} == {
        "optimizer.state.0.step": (), "optimizer.state.0.exp_avg": (4,), "shadow.0": (6,), "metrics.auc": (),
    }  # fmt: skip


@pytest.mark.parametrize("prefix", ["module.", "ema_model."])
def test_averages_that_libraries_keep_are_other_weights(tmp_path: Path, prefix: str) -> None:
    """`AveragedModel` of torch and others name a count beside the weights, which have a prefix."""
    average = {"n_averaged": torch.tensor(7), f"{prefix}a": torch.ones(2, 3)}
    torch.save({"model": {"a": torch.zeros(2, 3)}, "average": average}, tmp_path / "last.pth")
    found = read_state_dict(tmp_path)
    assert f"average.{prefix}a" in {each.name for each in found.unread if each.is_other_weights}


def test_the_weights_of_an_averaged_model_have_their_own_names(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    torch.save(torch.optim.swa_utils.AveragedModel(model).state_dict(), tmp_path / "average.pt")
    assert set(read_state_dict(tmp_path).tensors) == {"weight", "bias"}


def test_a_source_with_other_weights_is_converted_only_if_they_may_be_left_over(
    tmp_path: Path, source: Tensors
) -> None:
    torch.save({"state_dict": source, "state_dict_ema": source}, tmp_path / "model.pt")
    arguments = (tmp_path / "model.pt", tmp_path / "out", *OPTIONS, *FEATURES)
    refused = run(*arguments)
    assert refused.exit_code == 1 and f"{len(source)} left over" in refused.output
    assert f"such as state_dict_ema.{next(iter(source))}. Those of" in refused.output
    assert run(*arguments, "--allow-left-over").exit_code == 0


def test_a_small_file_that_names_one_list_very_often_is_listed_in_no_time(tmp_path: Path) -> None:
    nested: list[object] = [torch.zeros(1)]
    for _ in range(4):
        nested = [nested] * 1000
    torch.save({"model": {"w": torch.zeros(2)}, "nested": nested}, tmp_path / "model.pt")
    assert [each.name for each in read_state_dict(tmp_path).unread] == ["nested.0.0.0.0.0"]


@pytest.mark.parametrize("name", ["model.safetensors", "model.pt"])
def test_what_a_compiler_adds_to_names_is_removed_wherever_it_stands(tmp_path: Path, name: str) -> None:
    weights = {"_orig_mod.block._orig_mod.layer.0.w": torch.ones(2), "_orig_mod.head.w": torch.zeros(3)}
    save = save_file if name.endswith(".safetensors") else torch.save
    save(weights, tmp_path / name)
    assert set(read_state_dict(tmp_path).tensors) == {"block.layer.0.w", "head.w"}
    assert set(read_state_dict(tmp_path, "_orig_mod.block._orig_mod.").tensors) == {"layer.0.w", "head.w"}
    save({**weights, "head.w": torch.ones(3)}, tmp_path / name)
    with pytest.raises(RelayError, match=r"names head\.w twice"):
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
