"""The verdicts of a soak: pure functions of its samples and of the last metrics of each process."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from relaygr.demo.processes import Reading

FILES = "files"
"""The process of samples that no single process owns: files, which outlive processes."""
BROKER = "broker"
JUDGED_FROM = 0.3
"""The part of the run that is warm-up for every series."""
SETTLE_S = 150.0
"""The warm-up of each process: a worker remembers the requests of its last two minutes."""
LEAST_SPAN_S = 45.0
"""The shortest time of samples of one life that can be judged."""
_MOST_POINTS = 600
"""A longer life is thinned out: the number of pairs grows with the square."""
_MIB = 1024.0 * 1024.0
_NOT_ATOMIC = 3
"""A process counts while its metrics are read."""


class Resource(enum.StrEnum):
    """What is sampled."""

    RSS = "rss_bytes"
    PRIVATE = "private_bytes"
    FDS = "file_descriptors"
    THREADS = "threads"
    STORE_FILE = "history_store_file_bytes"
    STORE_USED = "history_store_used_bytes"
    SHARED = "shared_memory_bytes"
    LOGS = "log_bytes"
    LEASES = "leases"
    IN_FLIGHT = "messages_in_flight"


@dataclass(frozen=True, slots=True)
class Bound:
    """A resource in figures for people: its samples divided by `unit`, and the most growth a minute."""

    title: str
    unit: float
    per_minute: float


BOUNDS = {
    Resource.RSS: Bound("resident memory, MiB", _MIB, 0.6),
    Resource.PRIVATE: Bound("private memory, MiB", _MIB, 0.6),
    Resource.FDS: Bound("file descriptors", 1.0, 0.2),
    Resource.THREADS: Bound("threads", 1.0, 0.2),
    Resource.STORE_FILE: Bound("history store, file, MiB", _MIB, 0.1),
    Resource.STORE_USED: Bound("history store, in use, MiB", _MIB, 0.1),
    Resource.SHARED: Bound("shared memory (tmpfs), MiB", _MIB, 0.05),
    Resource.LOGS: Bound("logs, MiB", _MIB, 0.05),
    Resource.LEASES: Bound("leases", 1.0, 1.0),
    Resource.IN_FLIGHT: Bound("messages in flight", 1.0, 1.0),
}


@dataclass(frozen=True, slots=True)
class Sample:
    """One value of one process at a second of the run. `pid` tells the lives of a role apart."""

    second: float
    process: str
    pid: int
    resource: Resource
    value: float


@dataclass(frozen=True, slots=True)
class Growth:
    """The verdict on one resource of one process. Values are in the unit of its bound."""

    process: str
    resource: Resource
    level: float
    """The median of the last samples."""
    per_minute: float
    """NaN: no life was long enough."""

    @property
    def is_judged(self) -> bool:
        return self.process != BROKER and not math.isnan(self.per_minute)

    @property
    def is_flat(self) -> bool:
        return not self.is_judged or self.per_minute <= BOUNDS[self.resource].per_minute


@dataclass(frozen=True, slots=True)
class Window:
    """The judged part of a run, in seconds of the run."""

    from_s: float
    settle_s: float
    least_span_s: float

    @classmethod
    def of(cls, run_s: float) -> Window:
        """For a run of `run_s` seconds. The end of a short run is judged although it shows little."""
        return cls(JUDGED_FROM * run_s, min(SETTLE_S, 0.25 * run_s), min(LEAST_SPAN_S, 0.1 * run_s))


def growths(samples: Iterable[Sample], window: Window) -> list[Growth]:
    """The growth of each resource of each process, by process and resource."""
    series: dict[tuple[str, Resource], dict[int, list[tuple[float, float]]]] = {}
    for sample in samples:
        unit = BOUNDS[sample.resource].unit
        lives = series.setdefault((sample.process, sample.resource), {})
        lives.setdefault(sample.pid, []).append((sample.second, sample.value / unit))
    found = []
    for (process, resource), lives in sorted(series.items()):
        arrays = [np.array(life, dtype=np.float64) for life in lives.values()]
        newest = max(arrays, key=lambda life: float(life[-1, 0]))
        level = float(np.median(newest[-10:, 1]))
        found.append(Growth(process, resource, level, per_minute(arrays, window)))
    return found


def per_minute(lives: Sequence[NDArray[np.float64]], window: Window) -> float:
    """The median slope a minute between all pairs of samples of one life; NaN if no life is long enough.

    `lives`: for each life the seconds and values, float64 [samples, 2], in the order of time.
    """
    slopes = []
    for life in lives:
        begins_s = life[0, 0] + window.settle_s
        judged = life[life[:, 0] >= max(begins_s, window.from_s)]
        if len(judged) < 3 or judged[-1, 0] - judged[0, 0] < window.least_span_s:
            continue
        judged = judged[:: math.ceil(len(judged) / _MOST_POINTS)]
        first, second = np.triu_indices(len(judged), 1)
        seconds = judged[second, 0] - judged[first, 0]
        slopes.append((judged[second, 1] - judged[first, 1])[seconds > 0] / seconds[seconds > 0])
    return float(np.median(np.concatenate(slopes))) * 60 if slopes else float("nan")


# -- counters -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Life:
    """The last metrics of one process."""

    role: str
    pid: int
    reading: Reading
    unseen: int = 0
    """The most messages that it handled after this reading; 0 if it was idle then."""


@dataclass(frozen=True, slots=True)
class Ends:
    """The gateway's view of the run."""

    offered: int
    """Impressions of the schedule until the traffic was stopped."""
    recorded: int
    answered: int
    lost: int
    not_sent: int
    unrecorded_answers: int
    """Answers to the warm-up requests, and second answers, which the gateway dropped."""
    without_prefix: int
    """Answered requests, those of the warm-up included, of users without a history: there is nothing to look up."""
    excused: int = 0
    """The most requests that were lost because the broker was away for longer than their budget."""
    events_unacknowledged: int = 0


@dataclass(frozen=True, slots=True)
class Account:
    """Two numbers that must agree within `slack`."""

    name: str
    expected: float
    found: float
    slack: float = 0.0

    @property
    def adds_up(self) -> bool:
        return abs(self.expected - self.found) <= self.slack


def accounts(
    workers: Sequence[Life], triggers: Sequence[Life], supervisor: Life, ends: Ends, worker_kills: int
) -> list[Account]:
    """What must agree at the end, after all messages were handled."""
    found = [
        Account("impressions offered, and recorded ends", ends.offered, ends.recorded),
        Account("requests lost", 0, ends.lost, ends.excused),
        Account("requests not sent", 0, ends.not_sent),
        Account(
            "answers written by the workers, and received by the gateway",
            sum(_answers(life.reading) for life in workers),
            ends.answered + ends.unrecorded_answers,
            sum(life.unseen for life in workers),
        ),
        Account(
            "retrieval events, and decisions of the triggers",
            ends.offered - ends.not_sent,
            sum(life.reading.total("relaygr_trigger_decisions_total") for life in triggers),
            sum(life.unseen for life in triggers) + ends.events_unacknowledged,
        ),
        Account(
            "requests with a prefix, and look-ups: hits, joins and misses",
            sum(_answers(life.reading) for life in workers) - ends.without_prefix,
            sum(_look_ups(life.reading) for life in workers),
            sum(_ended_early(life.reading) + _slack(life) for life in workers),
        ),
        Account(
            "kills of workers, and children that the supervisor replaced",
            worker_kills,
            supervisor.reading.total("relaygr_supervisor_replaced_total"),
        ),
    ]
    for number, life in enumerate(workers, 1):
        found += [Account(f"worker {number}: {one.name}", one.expected, one.found, one.slack) for one in _of(life)]
    return found


def _of(life: Life) -> list[Account]:
    """The accounts of one worker process. Those of a killed one may differ by what was in flight at the scrape."""
    told = life.reading
    slack = _slack(life)
    found = [
        Account("requests received, and answered", _messages(told, "ranking"), _answers(told), slack),
        Account(
            "pre-infer jobs received, and ended",
            _messages(told, "preinfer"),
            told.total("relaygr_worker_preinfer_jobs_total"),
            slack,
        ),
        Account("models refused at a reload", 0, _refused_models(told)),
    ]
    if not life.unseen:
        found += [
            Account("messages in flight at the end", 0, told.total("relaygr_consumer_in_flight_messages")),
            Account("leases at the end", 0, told.total("relaygr_cache_leases")),
            Account("requests outstanding at the end", 0, told.total("relaygr_worker_ranking_outstanding")),
            Account(
                "spills started, and ended",
                told.total("relaygr_cache_spills_total", outcome="started"),
                told.total("relaygr_cache_spills_ended_total"),
            ),
        ]
    return found


def _slack(life: Life) -> float:
    """By how much two counters of one reading may differ."""
    return life.reading.total("relaygr_consumer_in_flight_messages") + _NOT_ATOMIC if life.unseen else 0.0


def _ended_early(told: Reading) -> float:
    """The most requests that ended before their look-up, for lack of time."""
    truncated = told.total("relaygr_worker_ranked_total", path="truncated")
    return told.total("relaygr_worker_unranked_total") + truncated


def _answers(told: Reading) -> float:
    return told.total("relaygr_worker_ranked_total") + told.total("relaygr_worker_unranked_total")


def _look_ups(told: Reading) -> float:
    return sum(told.total(f"relaygr_cache_{kind}_total") for kind in ("hits", "joins", "misses"))


def _messages(told: Reading, topic: str) -> float:
    by_topic = told.by_label("relaygr_consumer_messages_total", "topic")
    return sum(count for name, count in by_topic.items() if name.endswith(f".{topic}"))


def _refused_models(told: Reading) -> float:
    reloads = told.by_label("relaygr_model_reloads_total", "outcome")
    return sum(count for outcome, count in reloads.items() if outcome not in ("swapped", "unchanged"))
