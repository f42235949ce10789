"""NDCG@10 of the lists that two runs served, where only the item that the user chose next is relevant."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from relaygr.schemas.ended import Ended
from relaygr.schemas.messages import Path
from relaygr.traffic.records import ImpressionRecord
from relaygr.training.ranking import TOP, Estimate, estimate


@dataclass(frozen=True, slots=True)
class ServedQuality:
    """NDCG@10 over some test behaviours: the mean of each run, and the difference in pairs.

    An item that was not among the candidates counts 0. For the intervals the users are the sample.
    """

    behaviours: int
    users: int
    relay: Estimate
    full: Estimate
    difference: Estimate
    """Relay on less relay off."""
    retrieval: Estimate
    """Of the candidates in the order of retrieval, which asks no ranker."""


@dataclass(frozen=True, slots=True)
class QualityComparison:
    """Two runs over the same test behaviours."""

    retrieved_share: float
    """The share of the behaviours whose item was among the candidates."""
    other_model: int
    """Behaviours that are left out below, since the runs answered them with different models."""
    served: ServedQuality
    """All behaviours. A request without an answer in time counts 0."""
    both: ServedQuality
    """The behaviours that both runs answered in time."""
    on_part: ServedQuality
    """Those of `both` that the run without the relay ranked on a part of the history."""


def compare_quality(relay: Iterable[ImpressionRecord], full: Iterable[ImpressionRecord]) -> QualityComparison:
    """Compares impression by impression. Raises ValueError if the runs have none in common."""
    ours, theirs = _by_number(relay), _by_number(full)
    common = sorted(ours.keys() & theirs.keys())
    if not common:
        raise ValueError("no impression was played in both runs")
    numbers = [number for number in common if _same_model(ours[number], theirs[number])]
    both = [number for number in numbers if _is_served(ours[number]) and _is_served(theirs[number])]
    on_part = [number for number in both if theirs[number].path == Path.TRUNCATED]
    retrieved = sum(bool(ours[number].next_retrieved or theirs[number].next_retrieved) for number in common)
    return QualityComparison(
        retrieved_share=retrieved / len(common),
        other_model=len(common) - len(numbers),
        served=_quality(ours, theirs, numbers),
        both=_quality(ours, theirs, both),
        on_part=_quality(ours, theirs, on_part),
    )


def _by_number(records: Iterable[ImpressionRecord]) -> Mapping[int, ImpressionRecord]:
    return {record.number: record for record in records}


def _same_model(one: ImpressionRecord, other: ImpressionRecord) -> bool:
    """Also if one of them was not ranked, which has no model."""
    return None in (one.model_revision, other.model_revision) or one.model_revision == other.model_revision


def _is_served(record: ImpressionRecord) -> bool:
    return record.status == Ended.RANKED and not record.late


def _quality(
    ours: Mapping[int, ImpressionRecord], theirs: Mapping[int, ImpressionRecord], numbers: list[int]
) -> ServedQuality:
    users = [ours[number].user_id for number in numbers]
    relay, full = (np.array([_ndcg(run[number]) for number in numbers]) for run in (ours, theirs))
    return ServedQuality(
        len(numbers),
        len(set(users)),
        estimate(relay, users),
        estimate(full, users),
        estimate(relay - full, users),
        estimate(np.array([_gain(ours[number].next_place) for number in numbers]), users),
    )


def _ndcg(record: ImpressionRecord) -> float:
    return _gain(record.next_rank if _is_served(record) else None)


def _gain(place: int | None) -> float:
    """NDCG@10 of one relevant item at this place, from 0; None: it is not in the list."""
    return 0.0 if place is None or place >= TOP else 1 / math.log2(place + 2)
