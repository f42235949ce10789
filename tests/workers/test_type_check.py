"""What types in fewer bits change of a model's scores: which are measured, beside which, and in which time."""

from __future__ import annotations

from pathlib import Path

import pytest

from relaygr.worker.kv import DramKvDtype, KvDtype
from relaygr.worker.model.checkpoint import random_checkpoint, save_checkpoint
from relaygr.worker.model.engine import load_engine
from relaygr.worker.model.options import ComputeDtype
from relaygr.worker.score_error import made_sample
from relaygr.worker.type_check import ServedType, TypeCheck
from tests.worlds.model import small_config


@pytest.fixture
def model(tmp_path: Path) -> Path:
    config = small_config()
    save_checkpoint(tmp_path, config, random_checkpoint(config, 0).tensors)
    return tmp_path


@pytest.mark.parametrize(
    ("kv_dtype", "compute_dtype", "expected"),
    [
        (None, None, {"kv": ["bfloat16", "int8", "float8"], "dram": ["bfloat16", "int8"]}),
        (KvDtype.BFLOAT16, ComputeDtype.BFLOAT16, {"kv": ["int8", "float8"], "dram": ["int8"]}),
        (KvDtype.INT8, None, {"kv": ["bfloat16", "int8", "float8"], "dram": []}),
    ],
    ids=["float32", "bfloat16", "K,V int8"],
)
def test_each_type_that_loses_something_is_measured(
    model: Path, kv_dtype: KvDtype | None, compute_dtype: ComputeDtype | None, expected: dict[str, list[str]]
) -> None:
    types = TypeCheck(model, "cpu", (), kv_dtype, compute_dtype).every_type()
    assert [each.value for each in types if isinstance(each, KvDtype)] == expected["kv"]
    assert [each.value for each in types if isinstance(each, DramKvDtype)] == expected["dram"]
    assert [each.value for each in types if isinstance(each, ComputeDtype)] == ["bfloat16", "int8"]


def test_a_type_is_compared_with_the_one_that_loses_nothing(model: Path) -> None:
    sample = made_sample(load_engine(model, "cpu", KvDtype.FLOAT32), 2)
    check = TypeCheck(model, "cpu", (), KvDtype.FLOAT32, ComputeDtype.BFLOAT16)
    types: list[ServedType] = [KvDtype.INT8, DramKvDtype.INT8, ComputeDtype.BFLOAT16]
    found = list(check.run(types, *sample, 1800))
    assert [(each.setting, each.exact) for each in found] == [
        ("kv_dtype", KvDtype.BFLOAT16),
        ("dram_kv_dtype", KvDtype.FLOAT32),
        ("compute_dtype", ComputeDtype.FLOAT32),
    ]
    assert all(each.error is not None and each.error.max_score_error > 0 for each in found)
    # Heads of 8 and 6: 28 bytes a token and head become 14 and two exponents; in DRAM 56 become 14 and two scales of 4.
    assert [each.room for each in found] == pytest.approx([28 / 16, 56 / 22, 1])


def test_after_the_time_only_the_first_type_is_measured_for_one_user(model: Path) -> None:
    sample = made_sample(load_engine(model, "cpu", KvDtype.FLOAT32), 2)
    first, second = TypeCheck(model, "cpu", ()).run([KvDtype.INT8, KvDtype.FLOAT8], *sample, seconds=0)
    assert first.error is not None and first.error.users == 1
    assert (second.error, second.not_measured) == (None, "No time was left (--minutes).")
