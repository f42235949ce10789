"""The messages of the relay: one class for each topic, and the parts that they share.

Each field's annotation states its kind (type, bounds, unit, shape) and meaning; `docs/messages.md`
is generated from here. Times ending in `_us` are microseconds since the epoch on the writer's wall
clock unless their text says otherwise; durations say so.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from relaygr.schemas import limits
from relaygr.schemas.digest import DIGEST_BYTES, DigestChain, digest_chain
from relaygr.schemas.ended import WIRE_ENDS, WIRE_REASONS, Ended, Reason
from relaygr.schemas.fields import FEW, Choice, Digest, FieldError, Flag, ListOf, Other, Packed, Real, Text, UInt
from relaygr.schemas.record import record
from relaygr.schemas.times import EARLIEST_MS, wrong_unit

# Settings take these from `limits`, which does not import numpy.
MAX_BEHAVIOURS = limits.MAX_BEHAVIOURS
MAX_SUFFIX_BEHAVIOURS = limits.MAX_SUFFIX_BEHAVIOURS
MAX_CANDIDATES = limits.MAX_CANDIDATES
MAX_FEATURES = limits.MAX_FEATURES
MAX_BUDGET_MS = limits.MAX_BUDGET_MS
MAX_SCENARIOS = limits.MAX_SCENARIOS
DEFAULT_SCENARIO = limits.DEFAULT_SCENARIO
MAX_TASKS = 16
MAX_EVENT_BEHAVIOURS = 256
MAX_CONTINUED = 32_768
MAX_POSITION = 2**53 - 1
MAX_PARTITIONS = 4_096
LENGTH_BUCKETS = 24
MAX_MISSED_IDS = 128
MAX_OVERFLOW_PARTITIONS = 64
MAX_VERSION_NUMBER = 2**53 - 1
"""Exact in every language, JSON's numbers included."""

Int64Array = NDArray[np.int64]
UInt16Array = NDArray[np.uint16]
Float32Array = NDArray[np.float32]

REQUEST_ID_TEXT = Text(128)
RequestId = Annotated[
    str,
    REQUEST_ID_TEXT,
    "one impression; `GATEWAY.INCARNATION.SEQUENCE.TOKEN`, unique over gateways and restarts; the token is random",
]
USER_ID_TEXT = Text(256)
UserId = Annotated[str, USER_ID_TEXT, "the user; its UTF-8 bytes are the message key"]
SCENARIO_TEXT = Text(64)
Scenario = Annotated[
    str | None,
    SCENARIO_TEXT,
    "the scenario, such as `home`, which trigger and workers have in their settings; absent: `default`",
]
WorkerId = Annotated[str, Text(128), "the worker: its `group.instance.id`"]
ItemIds = Annotated[Int64Array, Packed("<i8", MAX_BEHAVIOURS, "behaviours"), "item of each behaviour, oldest first"]
Actions = Annotated[UInt16Array, Packed("<u2", MAX_BEHAVIOURS, "behaviours"), "action code of each behaviour"]
Timestamps = Annotated[
    Int64Array,
    Packed("<i8", MAX_BEHAVIOURS, "behaviours"),
    "time of each behaviour, milliseconds since the epoch; it never decreases",
]


class Path(enum.StrEnum):
    """How a ranking request was served: from which tier, or without a cached prefix."""

    HBM = "hbm"
    DRAM = "dram"
    PENDING = "pending"
    FULL = "full"
    TRUNCATED = "truncated"


class StaleCause(enum.StrEnum):
    """Why a request is ranked with another history than it names, or with an incomplete one."""

    GAP = "gap"
    """Behaviours are missing in the worker's history, until a snapshot brings them."""
    DELETED = "deleted"
    """The user was deleted after the request's history was chosen."""
    BEHIND = "behind"
    """The named history has not reached the worker."""
    REPLACED = "replaced"
    """The worker has a newer history with other content."""
    MISSING = "missing"
    """The worker has no history of the user."""


class PrefixSource(enum.StrEnum):
    """The source of the prefix's K,V before the prefix was ready in HBM."""

    COMPUTED = "computed"
    DRAM = "dram"


class WorkerState(enum.StrEnum):
    """The state of a worker, as its status reports it."""

    STARTING = "starting"
    READY = "ready"
    STOPPING = "stopping"


@record(frozen=True, slots=True, eq=False)
class Behaviours:
    """A user's behaviours, oldest first: three arrays of equal length."""

    items: ItemIds
    actions: Actions
    timestamps_ms: Timestamps

    @classmethod
    def empty(cls) -> Behaviours:
        return cls(np.empty(0, "<i8"), np.empty(0, "<u2"), np.empty(0, "<i8"))

    @classmethod
    def of(cls, rows: Iterable[tuple[int, int, int]]) -> Behaviours:
        """From `(item, action, timestamp_ms)` of each behaviour, oldest first. Raises ValueError for other rows."""
        columns: list[tuple[int, ...]] = list(zip(*rows, strict=True)) or [(), (), ()]
        if len(columns) != 3:
            raise ValueError(f"a behaviour is (item, action, timestamp_ms), not {len(columns)} values")
        return cls(*map(_as_array, columns))

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, part: slice) -> Behaviours:
        return Behaviours(self.items[part], self.actions[part], self.timestamps_ms[part])

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Behaviours)
            and np.array_equal(self.items, other.items)
            and np.array_equal(self.actions, other.actions)
            and np.array_equal(self.timestamps_ms, other.timestamps_ms)
        )

    def __add__(self, later: Behaviours) -> Behaviours:
        return Behaviours(
            np.concatenate((self.items, later.items)),
            np.concatenate((self.actions, later.actions)),
            np.concatenate((self.timestamps_ms, later.timestamps_ms)),
        )

    def check(self) -> None:
        """Raises FieldError unless all three are of equal length and the times never decrease. Lists become arrays."""
        array = np.ndarray
        if type(self.items) is not array or type(self.actions) is not array or type(self.timestamps_ms) is not array:
            _make_arrays(self, "items", "actions", "timestamps_ms")
        sizes = {self.items.size, self.actions.size, self.timestamps_ms.size}
        if len(sizes) != 1:
            raise FieldError(
                f": {self.items.size} items, {self.actions.size} actions, {self.timestamps_ms.size} timestamps"
            )
        if _decrease(self.timestamps_ms):
            raise FieldError(".timestamps_ms: times decrease; send behaviours oldest first")

    def check_unit(self, name: str) -> None:
        """Raises FieldError if the newest time is in another unit than ms, or before 1970. `name`: of the field."""
        if len(self) and (wrong := wrong_unit(int(self.timestamps_ms[-1]), "milliseconds")):
            raise FieldError(f"{name}.timestamps_ms: {wrong}")


@record(frozen=True, slots=True)
class HistoryVersion:
    """Identifies a history: a number that grows with each write, its length, and the digest of its content."""

    number: Annotated[int, UInt("", MAX_VERSION_NUMBER), "the writer's version number; a larger one is newer"]
    length: Annotated[int, UInt("behaviours", MAX_BEHAVIOURS), "number of behaviours"]
    digest: Annotated[bytes, Digest(DIGEST_BYTES), "last digest of the chain (`relaygr.schemas.digest`)"]


@record(frozen=True, slots=True)
class BehavioursOffset:
    """All records before an offset of the behaviours topic."""

    partition: Annotated[int, UInt("", MAX_PARTITIONS), "the user's partition"]
    offset: Annotated[int, UInt(), "offset of the first record that is not covered"]
    topic_id: Annotated[
        str | None, Text(64), "id that the cluster gave the topic, as Kafka's tools print it; absent: not checked"
    ] = None


@record(frozen=True, slots=True, eq=False)
class Continuation:
    """Added to a snapshot that a worker writes, so that other workers treat it like the records that it was made from.

    The arrays describe the last behaviours, which came as records of the behaviours topic. An older snapshot of the
    feature pipeline may come later, and keeps those of them that it does not cover.
    """

    next_offset: Annotated[
        int, UInt(), "the worker had read this user's records below this offset of the history topic"
    ]
    written_at_ms: Annotated[
        int, UInt("ms since the epoch"), "timestamp of the pipeline's snapshot that it continues; 0: none"
    ]
    covered_offset: Annotated[int, UInt(), "first offset of the behaviours topic that the arrays may have"]
    covered_before_ms: Annotated[
        int, UInt("ms since the epoch"), "records of the behaviours topic with an older timestamp were covered; 0: none"
    ]
    offsets: Annotated[
        Int64Array, Packed("<i8", MAX_CONTINUED, "last behaviours"), "offset of the record of each of these behaviours"
    ]
    recorded_at_ms: Annotated[
        Int64Array, Packed("<i8", MAX_CONTINUED, "last behaviours"), "timestamp of that record in its log"
    ]
    positions: Annotated[
        Int64Array, Packed("<i8", MAX_CONTINUED, "last behaviours"), "position in the history; -1: the record gave none"
    ]
    sent_times_ms: Annotated[
        Int64Array,
        Packed("<i8", MAX_CONTINUED, "last behaviours"),
        "time of the behaviour as it was sent, which may decrease; -2^63: it was far ahead of its record's timestamp",
    ]
    topic_id: Annotated[
        str | None, Text(64), "id that the cluster gave the history topic; in another topic the offsets mean nothing"
    ] = None
    next_position: Annotated[
        int | None,
        UInt("behaviours", MAX_POSITION),
        "position of the next behaviour in the publisher's count; absent: `first_position` + number of behaviours",
    ] = None

    def check(self) -> None:
        sizes = {self.offsets.size, self.recorded_at_ms.size, self.positions.size, self.sent_times_ms.size}
        if len(sizes) != 1:
            raise FieldError(": the arrays have different lengths")
        if not self.offsets.size:
            return
        if min(self.offsets.min(), self.recorded_at_ms.min()) < 0:
            raise FieldError(": offsets and timestamps are at least 0")
        if self.positions.min() < -1 or self.positions.max() > MAX_POSITION:
            raise FieldError(f".positions: they are -1 to {MAX_POSITION}")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Continuation) and _as_comparable(self) == _as_comparable(other)


@record(frozen=True, slots=True, eq=False)
class History:
    """A user's long-term behaviours and features at one version: a value of the history topic, or inline."""

    user_id: UserId
    number: Annotated[int, UInt("", MAX_VERSION_NUMBER), "the writer's version number; a larger one is newer"]
    features: Annotated[
        Int64Array,
        Packed("<i8", MAX_FEATURES, "features"),
        "categorical user features, in the order of the model's `contextual_features`",
    ]
    behaviours: Annotated[Behaviours, "long-term behaviours"]
    first_position: Annotated[
        int | None, UInt("behaviours", MAX_POSITION), "number of older behaviours that the writer left out; absent: 0"
    ] = None
    covers: Annotated[
        BehavioursOffset | None,
        "the records of the behaviours topic that this snapshot includes; absent: those with an older timestamp",
    ] = None
    continues: Annotated[Continuation | None, "set by a worker that saves a history; pipelines leave it out"] = None
    cut_ms: Annotated[
        int | None,
        UInt("ms since the epoch"),
        "the latest time of a behaviour that this snapshot can include: later ones stay in the history; without effect "
        "beside `covers`; absent: no limit",
    ] = None

    def check(self) -> None:
        if self.continues is not None and self.continues.offsets.size > len(self.behaviours):
            raise FieldError(".continues: more entries than behaviours")

    def chain(self) -> DigestChain:
        """The digest chain of features and behaviours. Lists become arrays."""
        _make_arrays(self, "features")
        _make_arrays(self.behaviours, "items", "actions", "timestamps_ms")
        return digest_chain(self.features, self.behaviours)

    def version(self) -> HistoryVersion:
        """The version that identifies this content."""
        return HistoryVersion(self.number, len(self.behaviours), self.chain().digest)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, History)
            and (self.user_id, self.number) == (other.user_id, other.number)
            and np.array_equal(self.features, other.features)
            and self.behaviours == other.behaviours
            and (self.first_position, self.covers, self.continues, self.cut_ms)
            == (other.first_position, other.covers, other.continues, other.cut_ms)
        )


AskedVersion = Annotated[HistoryVersion | None, "the history to use; absent: the newest that the worker has"]
InlineHistory = Annotated[History | None, "the history itself, if the history topic does not carry it"]
ExactLength = Annotated[
    int | None,
    UInt("behaviours", MAX_BEHAVIOURS),
    "instead of `history_version`, for publishers without digests: N, for exactly the first N behaviours",
]
LeastLength = Annotated[
    int | None,
    UInt("behaviours", MAX_BEHAVIOURS),
    "instead of `history_version`: N, for the newest history with at least N behaviours",
]


@record(frozen=True, slots=True)
class BehaviourEvent:
    """New behaviours of a user, which workers append to the user's history."""

    user_id: UserId
    behaviours: Annotated[Behaviours, f"the new behaviours, oldest first: 1 to {MAX_EVENT_BEHAVIOURS}"]
    position: Annotated[
        int | None,
        UInt("behaviours", MAX_POSITION),
        "number of behaviours of this user before the first of these, since the user's first, or since the beginning "
        "of a log that goes on from another; absent: the order of the topic",
    ] = None

    def check(self) -> None:
        if not 1 <= len(self.behaviours) <= MAX_EVENT_BEHAVIOURS:
            raise FieldError(f".behaviours: {len(self.behaviours)}, expected 1 to {MAX_EVENT_BEHAVIOURS}")


@record(frozen=True, slots=True)
class RetrievalEvent:
    """Gateway to trigger: an impression has begun. The event estimates the time and size of the ranking request."""

    request_id: RequestId
    user_id: UserId
    retrieval_at_us: Annotated[
        int, UInt("µs since the epoch"), "when retrieval began; query-time encodings use this time"
    ]
    expected_ranking_at_us: Annotated[
        int, UInt("µs since the epoch"), "estimated time at which the gateway sends the ranking request"
    ]
    ranking_budget_ms: Annotated[int, UInt("ms", MAX_BUDGET_MS, 1), "time limit of the ranking stage"]
    expected_candidates: Annotated[int, UInt("candidates", MAX_CANDIDATES), "estimated number of candidates"]
    expected_suffix: Annotated[
        int, UInt("behaviours", MAX_SUFFIX_BEHAVIOURS), "estimated number of short-term behaviours"
    ]
    history_version: AskedVersion = None
    history: InlineHistory = None
    history_exactly: ExactLength = None
    history_at_least: LeastLength = None
    scenario: Scenario = None

    @property
    def history_length(self) -> int | None:
        """Behaviours in the inline or named history; None if neither is given."""
        return _history_length(self)

    def check(self) -> None:
        _check_times(self, "retrieval_at_us", "expected_ranking_at_us")
        _check_history(self)
        if self.history is not None and self.retrieval_at_us >= EARLIEST_MS * 1000:
            self.history.behaviours.check_unit(".history.behaviours")


@record(frozen=True, slots=True)
class PreInferJob:
    """Trigger to worker: compute this user's prefix before the ranking request arrives.

    It expires at `expected_ranking_at_us + ranking_budget_ms`.
    """

    request_id: RequestId
    user_id: UserId
    retrieval_at_us: Annotated[int, UInt("µs since the epoch"), "copied from the retrieval event"]
    expected_ranking_at_us: Annotated[int, UInt("µs since the epoch"), "copied from the retrieval event"]
    ranking_budget_ms: Annotated[int, UInt("ms", MAX_BUDGET_MS, 1), "copied from the retrieval event"]
    expected_candidates: Annotated[int, UInt("candidates", MAX_CANDIDATES), "copied from the retrieval event"]
    expected_suffix: Annotated[int, UInt("behaviours", MAX_SUFFIX_BEHAVIOURS), "copied from the retrieval event"]
    decided_at_us: Annotated[int, UInt("µs since the epoch"), "when the trigger admitted the job"]
    history_version: Annotated[HistoryVersion | None, "copied from the retrieval event"] = None
    history: Annotated[History | None, "copied from the retrieval event"] = None
    history_exactly: Annotated[int | None, UInt("behaviours", MAX_BEHAVIOURS), "copied from the retrieval event"] = None
    history_at_least: Annotated[int | None, UInt("behaviours", MAX_BEHAVIOURS), "copied from the retrieval event"] = (
        None
    )
    scenario: Annotated[str | None, SCENARIO_TEXT, "copied from the retrieval event"] = None

    @property
    def expires_at_us(self) -> int:
        """When the job expires, µs since the epoch."""
        return self.expected_ranking_at_us + self.ranking_budget_ms * 1000

    @property
    def history_length(self) -> int | None:
        """Behaviours in the inline or named history; None if neither is given."""
        return _history_length(self)

    def check(self) -> None:
        _check_history(self)


@record(frozen=True, slots=True)
class Diverted:
    """Worker to worker, on the topic `ranking-overflow`: who passed a ranking request on, and with which history."""

    worker_id: Annotated[str, Text(128), "the worker that received the request from the gateway"]
    left_out: Annotated[
        int,
        UInt("behaviours", MAX_BEHAVIOURS),
        "oldest behaviours of the prefix that are not attached, for lack of space",
    ] = 0
    history_version: Annotated[HistoryVersion | None, "the history of which `history` is the newest part"] = None
    history_stale: Annotated[bool, Flag(), "as in the result"] = False
    history_loading: Annotated[bool, Flag(), "as in the result"] = False
    history_stale_cause: Annotated[StaleCause | Other | None, Choice(StaleCause, is_open=True), "as in the result"] = (
        None
    )


@record(frozen=True, slots=True, eq=False)
class RankingRequest:
    """Gateway to worker: score these candidates for this user, by this deadline."""

    request_id: RequestId
    user_id: UserId
    sent_at_us: Annotated[int, UInt("µs since the epoch"), "when the gateway sent the request"]
    deadline_us: Annotated[int, UInt("µs since the epoch"), "when the result must reach the gateway"]
    query_time_ms: Annotated[int, UInt("ms since the epoch"), "query time of the time encodings, fixed at retrieval"]
    candidates: Annotated[Int64Array, Packed("<i8", MAX_CANDIDATES, "candidates", min_length=1), "item ids to score"]
    suffix: Annotated[Behaviours, "short-term behaviours that follow the prefix"]
    history_version: AskedVersion = None
    history: InlineHistory = None
    history_exactly: ExactLength = None
    history_at_least: LeastLength = None
    scenario: Scenario = None
    diverted: Annotated[Diverted | None, "set by the worker that passes the request on; absent: not diverted"] = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RankingRequest) and _as_comparable(self) == _as_comparable(other)

    def check(self) -> None:
        if type(self.candidates) is not np.ndarray:
            _make_arrays(self, "candidates")
        if len(self.suffix) > MAX_SUFFIX_BEHAVIOURS:
            raise FieldError(f".suffix: {len(self.suffix)} behaviours, expected at most {MAX_SUFFIX_BEHAVIOURS}")
        _check_times(self, "sent_at_us", "deadline_us", "query_time_ms")
        _check_history(self)
        if self.query_time_ms >= EARLIEST_MS:
            self.suffix.check_unit(".suffix")
            if self.history is not None:
                self.history.behaviours.check_unit(".history.behaviours")


@record(frozen=True, slots=True)
class StageTimings:
    """Durations of the stages of a ranking request at its worker."""

    queue_us: Annotated[
        int, UInt("µs"), "from receipt until the request was first scheduled, without `history_wait_us`"
    ] = 0
    wait_us: Annotated[int, UInt("µs"), "time spent waiting for a prefix that was being computed or reloaded"] = 0
    pre_infer_us: Annotated[int, UInt("µs"), "device time of the prefix chunks computed for this request"] = 0
    reload_us: Annotated[int, UInt("µs"), "copying the prefix from DRAM to HBM"] = 0
    rank_us: Annotated[int, UInt("µs"), "device time of the forward pass that scored the candidates"] = 0
    total_us: Annotated[int, UInt("µs"), "from receipt until the result was handed to the producer"] = 0
    history_wait_us: Annotated[
        int | None, UInt("µs"), "waiting for the history to arrive, or for the history store to open; absent: no wait"
    ] = None


@record(frozen=True, slots=True, eq=False)
class RankingResult:
    """Worker to gateway: how a ranking request ended. Each request has one result."""

    request_id: RequestId
    worker_id: WorkerId
    outcome: Annotated[Ended, Choice(WIRE_ENDS), "how the request ended"]
    request_sent_at_us: Annotated[
        int, UInt("µs since the epoch"), "`sent_at_us` of the request; 0 if the request could not be decoded"
    ]
    received_at_us: Annotated[
        int, UInt("µs since the epoch, the worker's clock"), "when the worker received the request"
    ]
    sent_at_us: Annotated[int, UInt("µs since the epoch, the worker's clock"), "when the worker sent the result"]
    timings: Annotated[StageTimings, "durations of the stages"]
    reason: Annotated[Reason | Other | None, Choice(WIRE_REASONS, is_open=True), "set if `failed`"] = None
    detail: Annotated[str | None, Text(512), "explanation for operators, if `failed`"] = None
    path: Annotated[Path | Other | None, Choice(Path, is_open=True), "set if `ranked`"] = None
    prefix_source: Annotated[
        PrefixSource | Other | None, Choice(PrefixSource, is_open=True), "set if `ranked` with a prefix"
    ] = None
    num_tasks: Annotated[int, UInt("tasks", MAX_TASKS), "columns of `scores`"] = 0
    scores: Annotated[
        Float32Array | None,
        Packed("<f4", MAX_CANDIDATES * MAX_TASKS, "candidates * num_tasks", finite=True),
        "row-major, in the order of the request's candidates; set if `ranked`",
    ] = None
    prefix_tokens: Annotated[int, UInt("tokens"), "length of the prefix that the candidates were scored against"] = 0
    tokens_cached: Annotated[
        int, UInt("tokens"), "prefix tokens that were cached when the worker looked the prefix up"
    ] = 0
    history_version: Annotated[HistoryVersion | None, "the history that was used"] = None
    history_stale: Annotated[
        bool,
        Flag(),
        "the worker used another history than the requested one, or none, or behaviours are missing in it",
    ] = False
    history_loading: Annotated[
        bool, Flag(), "the worker had not read all of this partition's histories yet, or not that of the named version"
    ] = False
    unknown_items: Annotated[
        int,
        UInt("items"),
        "item ids that are not in the model's vocabulary: of suffix and candidates, and of a prefix that was computed "
        "for this request",
    ] = 0
    model_revision: Annotated[str | None, Text(64), "hash of weights and config; set if `ranked`"] = None
    backlog_us: Annotated[
        int | None,
        UInt("µs"),
        "hint of overload: time that a new request must wait for admitted work; if refused, plus its own work; "
        "absent: none",
    ] = None
    diverted_by: Annotated[
        str | None, Text(128), "the worker that had no time for the request and passed it on; absent: not diverted"
    ] = None
    unknown_actions: Annotated[
        int | None,
        UInt("behaviours"),
        "behaviours of prefix and suffix with an action code that the model does not know; absent: none",
    ] = None
    unknown_features: Annotated[
        int | None,
        UInt("values"),
        "feature values of the history that are missing, not known to the model, or more than it has; absent: none",
    ] = None
    history_missing: Annotated[
        bool | None,
        Flag(),
        "the worker has no history of this user, or not yet (`history_loading`); absent: it has one",
    ] = None
    history_stale_cause: Annotated[
        StaleCause | Other | None,
        Choice(StaleCause, is_open=True),
        "why `history_stale`: `gap` (behaviours are missing until a snapshot brings them), `deleted` (the user was, "
        "after this history was chosen), `behind` (it has not arrived), `replaced` (a newer history has other content) "
        "or `missing` (no history of the user)",
    ] = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RankingResult) and _as_comparable(self) == _as_comparable(other)

    def check(self) -> None:
        if self.outcome is Ended.RANKED:
            missing = [name for name in ("path", "scores", "model_revision") if getattr(self, name) is None]
            if missing:
                raise FieldError(f": outcome is ranked, but {', '.join(missing)} is absent")
            _check_array("scores", self.scores)
            if self.num_tasks < 1 or (self.scores is not None and self.scores.size % self.num_tasks):
                raise FieldError(f".scores: not a multiple of {self.num_tasks} tasks")
        if self.outcome.row.needs_reason and self.reason is None:
            raise FieldError(f".reason: is required if {self.outcome}")


@record(frozen=True, slots=True)
class LatencyCoefficients:
    """The latency model of a worker's device, fitted by calibration (`docs/trigger.md`). All times in µs.

    T_full(n, m) = a0 + a1 (n+m) + a2 (n+m)^2; T_pre(n) = b0 + b1 n + b2 n^2;
    T_hit(n, m) = c0 + c1 m + c2 m (n+m) + c3 n; T_append(n, k) = b0 + b1 k + b2 k (2n+k) + b3 n;
    T_reload(bytes) = d0 + d1 bytes. n: prefix tokens, m: suffix tokens + candidates.
    """

    a0: Annotated[float, Real("µs"), "full inference, constant"]
    a1: Annotated[float, Real("µs per token"), "full inference, linear"]
    a2: Annotated[float, Real("µs per token²"), "full inference, quadratic"]
    b0: Annotated[float, Real("µs"), "pre-infer, constant"]
    b1: Annotated[float, Real("µs per token"), "pre-infer, linear"]
    b2: Annotated[float, Real("µs per token²"), "pre-infer, quadratic"]
    c0: Annotated[float, Real("µs"), "ranking on a cached prefix, constant"]
    c1: Annotated[float, Real("µs per token"), "ranking on a cached prefix, linear in m"]
    c2: Annotated[float, Real("µs per token²"), "ranking on a cached prefix, m (n+m)"]
    d0: Annotated[float, Real("µs"), "reload, constant"]
    d1: Annotated[float, Real("µs per byte"), "reload, per byte"]
    c3: Annotated[float, Real("µs per token"), "ranking on a cached prefix, linear in n"] = 0.0
    b3: Annotated[float, Real("µs per token"), "append to a cached prefix, linear in n"] = 0.0


@record(frozen=True, slots=True)
class LengthRatios:
    """Measured / predicted device time by `latency`. Entry b of a list is for prefixes of 2^(b-1) to 2^b - 1 tokens.

    0 stands for lengths without a measurement.
    """

    full: Annotated[tuple[float, ...], ListOf(Real(), LENGTH_BUCKETS), "full inference"]
    pre: Annotated[tuple[float, ...], ListOf(Real(), LENGTH_BUCKETS), "pre-infer and append"]
    hit: Annotated[tuple[float, ...], ListOf(Real(), LENGTH_BUCKETS), "ranking on a cached prefix"]


@record(frozen=True, slots=True)
class FullPathReport:
    """How full inference ends at a worker. Entry b of a list is for prefixes of 2^(b-1) to 2^b - 1 tokens."""

    outside_us: Annotated[
        int,
        UInt("µs"),
        "P99 of the recent time of a ranking request outside its device work: from the gateway to the worker, in the "
        "queue, in the worker's own code, and the reply margin",
    ]
    ratios: Annotated[
        tuple[float, ...], ListOf(Real(), LENGTH_BUCKETS), "P98 of measured / predicted device time of full inference"
    ]
    prepared: Annotated[
        tuple[int, ...],
        ListOf(UInt("requests"), LENGTH_BUCKETS),
        "requests whose prefix, or its tail, a pre-infer job computed, since the worker's start",
    ]
    needless: Annotated[
        tuple[int, ...],
        ListOf(UInt("requests"), LENGTH_BUCKETS),
        "those of `prepared` that full inference would have answered in time",
    ]
    missed: Annotated[
        tuple[str, ...],
        ListOf(REQUEST_ID_TEXT, MAX_MISSED_IDS),
        "recent requests without a pre-infer job that were truncated, rejected or late; consecutive statuses repeat "
        "an id",
    ]
    full_outside_us: Annotated[
        int | None,
        UInt("µs"),
        "`outside_us` of the requests that full inference served, which shorter work overtakes; absent: few lately",
    ] = None


@record(frozen=True, slots=True)
class LeadTimeReport:
    """Times from the start of retrieval to the ranking request, of recent jobs. One entry for each scenario."""

    scenarios: Annotated[
        tuple[str, ...], ListOf(SCENARIO_TEXT, MAX_SCENARIOS), "the scenarios; `default` without a name"
    ]
    low_shares: Annotated[
        tuple[float, ...], ListOf(Real(), MAX_SCENARIOS), "P10 of measured / expected time, by the gateway's clock"
    ]
    low_us: Annotated[tuple[int, ...], ListOf(UInt("µs"), MAX_SCENARIOS), "P10 of the measured times"]
    median_us: Annotated[tuple[int, ...], ListOf(UInt("µs"), MAX_SCENARIOS), "their median"]


@record(frozen=True, slots=True)
class PreInferSlots:
    """The slots of a pre-infer worker: it has no partitions, and takes a job of the pool for each free slot."""

    slots: Annotated[int, UInt("slots"), "jobs that the worker takes at a time"]
    free: Annotated[int, UInt("slots"), "those without a job now"]
    accepted: Annotated[int, UInt("jobs"), "jobs taken since the worker's start"]
    refused: Annotated[int, UInt("jobs"), "jobs that no pre-infer worker could end in time, since the worker's start"]


@record(frozen=True, slots=True)
class WorkerStatus:
    """Worker to triggers and monitors: its partitions, its free memory, its load and its latency model."""

    worker_id: WorkerId
    state: Annotated[WorkerState | Other, Choice(WorkerState, is_open=True), "state of the worker"]
    written_at_us: Annotated[int, UInt("µs since the epoch"), "when the worker wrote the status"]
    assignment_epoch: Annotated[int, UInt(), "number of this worker's partition assignments so far"]
    partitions: Annotated[
        tuple[int, ...], ListOf(UInt("", MAX_PARTITIONS), MAX_PARTITIONS), "partitions that the worker owns"
    ]
    model_revision: Annotated[str, Text(64), "hash of weights and config"]
    kv_bytes_per_token: Annotated[int, UInt("bytes"), "size of one token's K,V in all layers"]
    contextual_tokens: Annotated[int, UInt("tokens"), "tokens that precede the behaviours"]
    tokens_per_behaviour: Annotated[int, UInt("tokens", 16, 1), "tokens of one behaviour"]
    max_prefix_behaviours: Annotated[
        int, UInt("behaviours"), "longest prefix; of longer histories the newest behaviours are used"
    ]
    hbm_capacity_bytes: Annotated[int, UInt("bytes"), "size of the HBM tier"]
    hbm_free_bytes: Annotated[int, UInt("bytes"), "free or evictable bytes in the HBM tier"]
    dram_capacity_bytes: Annotated[int, UInt("bytes"), "size of the DRAM tier"]
    dram_free_bytes: Annotated[int, UInt("bytes"), "free or evictable bytes in the DRAM tier"]
    ranking_queue_p99_us: Annotated[int, UInt("µs"), "recent P99 of the time that ranking requests waited in the queue"]
    preinfer_queue_us: Annotated[int, UInt("µs"), "device time of the pre-infer work in the queue"]
    latency: Annotated[LatencyCoefficients, "the device's latency model, corrected while the worker runs"]
    full_path: Annotated[FullPathReport | None, "how full inference ends at this worker"] = None
    ranking_backlog_us: Annotated[
        int | None,
        UInt("µs"),
        "hint of overload: time that a new request must wait for admitted work; absent: not known",
    ] = None
    host: Annotated[str | None, Text(255), "name of the worker's machine"] = None
    metrics_url: Annotated[
        str | None, Text(255), "the worker's page `/metrics`; a loopback address is meant on the machine `host`"
    ] = None
    lead_times: Annotated[LeadTimeReport | None, "lead times that the worker measured; absent: too few lately"] = None
    reuses_prefixes: Annotated[
        bool | None,
        Flag(),
        "whether a prefix serves later impressions of its user, which the model's rules decide; absent: true",
    ] = None
    length_ratios: Annotated[
        LengthRatios | None, "measured / predicted device times by length; absent: an older worker"
    ] = None
    predictions_off: Annotated[
        bool | None, Flag(), "recent device times were mispredicted by half or more in the median; absent: not known"
    ] = None
    overflow_partitions: Annotated[
        tuple[int, ...] | None,
        ListOf(UInt("", MAX_PARTITIONS), MAX_OVERFLOW_PARTITIONS),
        "partitions of `ranking-overflow` on which the worker takes diverted requests; empty: none now, since it has "
        "no time itself; absent: it does not read that topic",
    ] = None
    active_since_us: Annotated[
        int | None,
        UInt("µs since the epoch"),
        "since when this process serves; a process with another value does not have the earlier prefixes in HBM; "
        "absent: an older worker",
    ] = None
    pre_infer: Annotated[PreInferSlots | None, "a pre-infer worker; absent: a worker that owns partitions"] = None


Message = RetrievalEvent | PreInferJob | RankingRequest | RankingResult | History | BehaviourEvent | WorkerStatus


def _history_length(message: RetrievalEvent | PreInferJob) -> int | None:
    if message.history is not None:
        return len(message.history.behaviours)
    if message.history_version is not None:
        return message.history_version.length
    return message.history_at_least if message.history_exactly is None else message.history_exactly


def _check_history(message: RetrievalEvent | PreInferJob | RankingRequest) -> None:
    version, history = message.history_version, message.history
    exactly, at_least = message.history_exactly, message.history_at_least
    if exactly is not None or at_least is not None:
        if version is not None or (exactly is not None and at_least is not None):
            raise FieldError(": set one of history_version, history_exactly and history_at_least")
        if history is not None:
            raise FieldError(".history: leave history_exactly and history_at_least out with an inline history")
    if history is None:
        return
    if history.user_id != message.user_id:
        raise FieldError(".history.user_id: not the message's user")
    if version is not None and version.length != len(history.behaviours):
        raise FieldError(f".history: {len(history.behaviours)} behaviours, but history_version has {version.length}")


def _check_times(message: RetrievalEvent | RankingRequest, *names: str) -> None:
    """Raises FieldError for a time in another unit: it would be long past, or far ahead."""
    for name in names:
        time = getattr(message, name)
        unit = "microseconds" if name.endswith("_us") else "milliseconds"
        # A clock that does not begin in 1970, as that of a simulation, has small times.
        if time >= EARLIEST_MS and (wrong := wrong_unit(time, unit)):
            raise FieldError(f".{name}: {wrong}")


def _decrease(times: Int64Array) -> bool:
    """Whether a time is before the one that precedes it."""
    if times.ndim == 1 and times.size <= FEW:
        listed = times.tolist()
        return bool(listed != sorted(listed))
    return bool(times.size > 1 and np.logical_or.reduce(times[1:] < times[:-1]))


def _make_arrays(message: Any, *names: str) -> None:
    """Gives a writer's message arrays in the place of lists. Decoded messages have arrays."""
    for name in names:
        value = getattr(message, name)
        if type(value) is not np.ndarray:
            object.__setattr__(message, name, _as_array(value))


def _as_array(values: Any) -> NDArray[Any]:
    """A plain sequence as an array, int64 if it is empty. Other values stay as they are, and `encode` refuses them."""
    if isinstance(values, np.ndarray):
        return values
    try:
        return np.asarray(values) if len(values) else np.empty(0, np.int64)
    except (TypeError, ValueError, OverflowError):
        return values  # type: ignore[no-any-return]


def _check_array(name: str, value: Any) -> None:
    """Raises FieldError for a list: a field could be packed from one, but messages need the methods of arrays."""
    if not isinstance(value, np.ndarray):
        raise FieldError(f".{name}: expected a numpy array, got {type(value).__name__}")


def _as_comparable(message: Any) -> list[Any]:
    values = (getattr(message, name) for name in message.__dataclass_fields__)
    return [value.tolist() if isinstance(value, np.ndarray) else value for value in values]
