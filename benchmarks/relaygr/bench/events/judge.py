"""The verdicts: what grew, and which counters do not add up. Pure functions of samples and readings."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from relaygr.ui.scrape import Reading

JUDGED_FROM: Final = 0.3
"""The part of the run that is warm-up for every series."""
SETTLE_S: Final = 150.0
"""The warm-up of each process: a worker remembers the requests of its last two minutes."""
LEAST_SPAN_S: Final = 45.0
"""The shortest time of samples of one life that can be judged."""
_MOST_POINTS: Final = 600
"""A longer life is thinned out: the number of pairs grows with the square."""
_MIB: Final = 1024.0 * 1024.0


class Resource(enum.StrEnum):
    """What is sampled."""

    RSS = "rss_bytes"
    FDS = "file_descriptors"
    THREADS = "threads"
    STORE = "history_store_bytes"
    SHARED = "shared_memory_bytes"
    LOGS = "log_bytes"


BOUNDS: Final = {
    Resource.RSS: (_MIB, 0.6),
    Resource.FDS: (1.0, 0.2),
    Resource.THREADS: (1.0, 0.2),
    Resource.STORE: (_MIB, 0.1),
    Resource.SHARED: (_MIB, 0.05),
    Resource.LOGS: (_MIB, 0.05),
}
"""The unit of a resource, and the most that it may grow a minute, in that unit."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One value of one process at a second of the run. `pid` tells the lives of a process apart; files have 0."""

    second: float
    process: str
    pid: int
    resource: Resource
    value: float


@dataclass(frozen=True, slots=True)
class Growth:
    """The growth of one resource of one process a minute, in the unit of its bound; None: no life was long enough."""

    process: str
    resource: Resource
    per_minute: float | None

    @property
    def is_flat(self) -> bool:
        return self.per_minute is None or self.per_minute <= BOUNDS[self.resource][1]


@dataclass(frozen=True, slots=True)
class Judged:
    """The judged part of a run, in seconds of the run."""

    from_s: float
    settle_s: float
    least_span_s: float

    @classmethod
    def of(cls, run_s: float) -> Judged:
        """For a run of `run_s` seconds. The end of a short run is judged although it shows little."""
        return cls(JUDGED_FROM * run_s, min(SETTLE_S, 0.25 * run_s), min(LEAST_SPAN_S, 0.1 * run_s))


def growths(samples: Iterable[Sample], judged: Judged) -> list[Growth]:
    """The growth of each resource of each process."""
    series: dict[tuple[str, Resource], dict[int, list[tuple[float, float]]]] = {}
    for sample in samples:
        lives = series.setdefault((sample.process, sample.resource), {})
        lives.setdefault(sample.pid, []).append((sample.second, sample.value / BOUNDS[sample.resource][0]))
    return [
        Growth(process, resource, per_minute([np.array(life) for life in lives.values()], judged))
        for (process, resource), lives in sorted(series.items())
    ]


def per_minute(lives: Sequence[NDArray[np.float64]], judged: Judged) -> float | None:
    """The median slope a minute between all pairs of samples of one life (Theil and Sen), so that steps between lives
    do not count and single peaks change little; None if no life is long enough.

    `lives`: for each life the seconds and values, float64 [samples, 2], in the order of time.
    """
    slopes = []
    for life in lives:
        part = life[life[:, 0] >= max(life[0, 0] + judged.settle_s, judged.from_s)]
        if len(part) < 3 or part[-1, 0] - part[0, 0] < judged.least_span_s:
            continue
        part = part[:: math.ceil(len(part) / _MOST_POINTS)]
        first, second = np.triu_indices(len(part), 1)
        seconds = part[second, 0] - part[first, 0]
        slopes.append((part[second, 1] - part[first, 1])[seconds > 0] / seconds[seconds > 0])
    return float(np.median(np.concatenate(slopes))) * 60 if slopes else None


# -- counters -----------------------------------------------------------------------------------------


@dataclass(slots=True)
class Life:
    """One process, and what it counted at its last reading."""

    role: str
    name: str
    pid: int
    reading: Reading = field(default_factory=Reading)
    read_s: float = 0.0
    unseen: int = 0
    """The most messages that it handled after this reading; 0 if it was idle then."""


@dataclass(frozen=True, slots=True)
class Ends:
    """The gateways' view of the run."""

    begun: int
    recorded: int
    lost: int
    lost_outside_outages: int
    not_sent: int
    unrecorded_answers: int
    """Answers to the warm-up requests, and second answers, which the gateway dropped."""
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


def accounts(lives: Sequence[Life], ends: Ends, take_overs: int) -> list[Account]:
    """What must agree at the end, after all messages were handled."""
    workers = [life for life in lives if life.role == "worker"]
    triggers = [life for life in lives if life.role == "trigger"]
    answered = ends.recorded - ends.lost - ends.not_sent + ends.unrecorded_answers
    return [
        Account("impressions begun, and recorded", ends.begun, ends.recorded),
        Account("requests lost outside an outage of the broker", 0, ends.lost_outside_outages),
        Account(
            "answers of the workers, and of the gateways",
            sum(_answers(life.reading) for life in workers),
            answered,
            sum(life.unseen for life in workers) + ends.lost,
        ),
        Account(
            "retrieval events, and decisions of the trigger",
            ends.begun,
            sum(life.reading.total("relaygr_trigger_decisions_total") for life in triggers),
            sum(life.unseen for life in triggers) + ends.events_unacknowledged + ends.not_sent,
        ),
        Account(
            "kills of active processes, and processes that the supervisor replaced",
            take_overs,
            sum(life.reading.total("relaygr_supervisor_replaced_total") for life in lives if life.role == "supervisor"),
        ),
        *(account for life in workers if not life.unseen for account in _of_worker(life)),
    ]


def _of_worker(life: Life) -> list[Account]:
    """The accounts of a worker that ran until the end."""
    told = life.reading
    jobs = told.total("relaygr_worker_preinfer_jobs_total")
    spills = told.total("relaygr_cache_spills_ended_total")
    reloads = told.by_label("relaygr_model_reloads_total", "outcome")
    refused = sum(count for outcome, count in reloads.items() if outcome not in ("swapped", "unchanged"))
    pairs = {
        "requests received, and answered": (_messages(told, "ranking"), _answers(told)),
        "pre-infer jobs received, and ended": (_messages(told, "preinfer"), jobs),
        "spills started, and ended": (told.total("relaygr_cache_spills_total", outcome="started"), spills),
        "messages in flight at the end": (0.0, told.total("relaygr_consumer_in_flight_messages")),
        "leases at the end": (0.0, told.total("relaygr_cache_leases")),
        "requests outstanding at the end": (0.0, told.total("relaygr_worker_ranking_outstanding")),
        "models refused at a reload": (0.0, refused),
    }
    return [Account(f"{life.name}: {name}", *pair) for name, pair in pairs.items()]


def _answers(told: Reading) -> float:
    return told.total("relaygr_worker_ranked_total") + told.total("relaygr_worker_unranked_total")


def _messages(told: Reading, topic: str) -> float:
    by_topic = told.by_label("relaygr_consumer_messages_total", "topic")
    return sum(count for name, count in by_topic.items() if name.endswith(f".{topic}"))
