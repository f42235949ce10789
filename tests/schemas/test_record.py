"""Records: dataclasses with the equality and hash of frozen ones, made by plain assignments."""

from __future__ import annotations

import pickle
from dataclasses import fields, replace

import pytest

from relaygr.schemas.messages import HistoryVersion, StageTimings
from relaygr.schemas.record import record


@record(frozen=True, slots=True, eq=False)
class ById:
    value: int


def test_equal_records_have_equal_hashes() -> None:
    one, same, other = (HistoryVersion(number, 10, b"digest") for number in (1, 1, 2))
    assert one == same
    assert hash(one) == hash(same)
    assert one != other
    assert {one: "found"}[same] == "found"


def test_a_record_without_equality_is_told_apart_by_identity() -> None:
    one = ById(1)
    assert one != ById(1)
    assert {one: "found"}[one] == "found"


def test_a_record_is_a_dataclass_with_slots() -> None:
    timings = StageTimings(queue_us=1)
    assert replace(timings, wait_us=2) == StageTimings(queue_us=1, wait_us=2)
    assert [field.name for field in fields(timings)][:2] == ["queue_us", "wait_us"]
    assert pickle.loads(pickle.dumps(timings)) == timings
    with pytest.raises(AttributeError):
        timings.unknown = 1  # type: ignore[attr-defined]


def test_a_record_is_made_without_a_call_for_each_field() -> None:
    assert StageTimings.__setattr__ is object.__setattr__
    assert "__setattr__" not in StageTimings.__init__.__code__.co_names
