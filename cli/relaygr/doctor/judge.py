"""Turns observations into findings. Pure: every function takes plain data and returns diagnoses."""

from __future__ import annotations

import enum
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from relaygr.client import Ended, RankOutcome
from relaygr.client.clock_offset import ClockOffset
from relaygr.cluster.rights import Role
from relaygr.cluster.topic_check import Severity, TopicReport
from relaygr.conditions import NO_WORKER, THROTTLED, UNREAD, Finding, Seen
from relaygr.conditions import judge as judge_conditions
from relaygr.kafka.settings import GroupProtocol
from relaygr.schemas.ended import Reason
from relaygr.worker.pool.stores.contract import StoreUrl

LARGEST_OFFSET_US: Final = 100_000
"""Clocks that differ by more make deadlines useless."""
LEAST_FILES: Final = 4096
HEADROOM: Final = 0.9
"""The share of the free memory that a worker may use (`relaygr.worker.memory`)."""
_FETCH, _GROUP_HEARTBEAT = 1, 68
_FIRST_FETCH_OF_4: Final = 4
"""Kafka 4.0 no longer knows the versions before."""
_BOUND = re.compile(r"(>=|<=|==|>|<)\s*([0-9][0-9.]*)")
_LIBRARY = re.compile(r"^(Broker|Local): ")
"""librdkafka begins the text of an error with the side that reports it."""
_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)(?:\[[^\]]*\])?\s*([^;]*)")


class Verdict(enum.StrEnum):
    """How a check ended."""

    OK = "ok"
    SKIP = "skip"
    """Not checked; the finding says why."""
    WARN = "warn"
    """The relay works, with less memory, speed or safety than it should have."""
    FAIL = "fail"
    """The relay, or this process of it, does not work."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """One finding of one check."""

    check: str
    verdict: Verdict
    what: str
    mend: str = ""
    """What to do; empty unless WARN or FAIL."""


def exit_code(found: Iterable[Diagnosis]) -> int:
    """0: nothing to do; 1: a warning; 2: a failure."""
    verdicts = {each.verdict for each in found}
    return 2 if Verdict.FAIL in verdicts else 1 if Verdict.WARN in verdicts else 0


@dataclass(frozen=True, slots=True)
class SeenBroker:
    """A cluster that answers."""

    address: str
    brokers: int
    is_embedded: bool
    apis: Mapping[int, tuple[int, int]]
    """Kafka's requests by their key, with the first and the last version; empty if not known."""


@dataclass(frozen=True, slots=True)
class SeenWorker:
    """A worker by its statuses."""

    worker_id: str
    state: str
    is_fresh: bool
    age_s: float
    partitions: frozenset[int]
    offset: ClockOffset | None
    """Its wall clock minus ours; None: no status came while we read."""
    is_pre_infer: bool = False
    """Whether it owns no partitions, and computes prefixes for the owners."""
    has_slots: bool = True
    """Of a pre-infer worker: whether it can take jobs."""
    metrics_url: str | None = None
    """Where its metrics can be read from here."""


@dataclass(frozen=True, slots=True)
class SeenFolder:
    """A folder on tmpfs, or the next one above it that exists."""

    path: str
    free_bytes: int
    is_memory: bool


def broker(seen: SeenBroker, group_protocol: GroupProtocol) -> list[Diagnosis]:
    """The cluster's version, by the requests that it knows, and whether it can do what the settings ask."""
    plural = "broker" if seen.brokers == 1 else "brokers"
    if seen.is_embedded:
        what = f"librdkafka's embedded cluster answers at {seen.address}: for tests only"
        return [Diagnosis("broker", Verdict.OK, what)]
    found = [Diagnosis("broker", Verdict.OK, f"{_version(seen.apis)} at {seen.address}, {seen.brokers} {plural}")]
    if seen.apis and group_protocol is GroupProtocol.CONSUMER and _GROUP_HEARTBEAT not in seen.apis:
        found.append(
            Diagnosis(
                "broker",
                Verdict.FAIL,
                "affinity is consumer_protocol, but this broker does not know group.protocol=consumer",
                "set affinity to range, or use Kafka 4.0 or newer",
            )
        )
    return found


def _version(apis: Mapping[int, tuple[int, int]]) -> str:
    if not apis:
        return "Kafka (its version is not known)"
    is_new = apis.get(_FETCH, (0, 0))[0] >= _FIRST_FETCH_OF_4
    return "Kafka 4.0 or newer" if is_new else "Kafka older than 4.0"


def topics(report: TopicReport) -> list[Diagnosis]:
    """Existence, partition counts, retention, clean-up and replication."""
    verdicts = {Severity.ERROR: Verdict.FAIL, Severity.WARNING: Verdict.WARN, Severity.NOTE: Verdict.SKIP}
    found = [Diagnosis("topics", verdicts[each.severity], each.what, each.mend) for each in report.findings]
    if not report.errors:
        what = f"{len(report.rows)} topics, of which the co-partitioned have equal partition counts"
        found.insert(0, Diagnosis("topics", Verdict.OK, what))
    return found


def roles(wanted: Sequence[Role], diverts: bool) -> tuple[Role, ...]:
    """The roles to check: that of a worker is `worker-divert` where `worker.divert` is on. `wanted` empty: all."""
    worker = Role.WORKER_DIVERT if diverts else Role.WORKER
    asked = wanted or (Role.GATEWAY, Role.TRIGGER, Role.WORKER)
    return tuple(dict.fromkeys(worker if role is Role.WORKER else role for role in asked))


def rights(missing: Mapping[Role, Sequence[str]], wanted: Collection[Role]) -> list[Diagnosis]:
    """`missing`: the rights that this user lacks, by role. `wanted`: the roles that it must have; empty: any."""
    usable = [role for role, lacking in missing.items() if not lacking]
    found = []
    if usable:
        found.append(Diagnosis("rights", Verdict.OK, f"this user may act as {', '.join(usable)}"))
    for role in wanted:
        found += [Diagnosis("rights", Verdict.FAIL, sentence, _grant(role)) for sentence in missing[role]]
    if not usable and not wanted:
        what = f"this user may act as none of {', '.join(missing)}"
        found.append(Diagnosis("rights", Verdict.FAIL, what, _grant(next(iter(missing)))))
    return found


def _grant(role: Role) -> str:
    return f"`relaygr topics acls --role {role}` prints the commands that grant it"


def versions(installed: Mapping[str, str], requirements: Collection[str]) -> list[Diagnosis]:
    """Whether the installed libraries lie in the ranges of the package. Those that are not installed are left out."""
    wrong = []
    for text in requirements:
        found = _REQUIREMENT.match(text)
        name = found[1].lower() if found else ""
        if found is not None and name in installed and not _is_within(installed[name], found[2]):
            wrong.append((name, found[2].strip()))
    if not wrong:
        kafka = installed.get("confluent-kafka", "?")
        return [Diagnosis("versions", Verdict.OK, f"relaygr {installed.get('relaygr', '?')}, confluent-kafka {kafka}")]
    return [
        Diagnosis(
            "versions",
            Verdict.FAIL,
            f"{name} {installed[name]} is installed, expected {wanted}",
            f"pip install '{name}{wanted}'",
        )
        for name, wanted in dict(wrong).items()
    ]


def _is_within(version: str, ranges: str) -> bool:
    own = _numbers(version)
    for sign, text in _BOUND.findall(ranges):
        bound = _numbers(text)
        width = max(len(own), len(bound))
        left, right = (each + (0,) * (width - len(each)) for each in (own, bound))
        if not {">=": left >= right, "<=": left <= right, "==": left == right, ">": left > right, "<": left < right}[
            sign
        ]:
            return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    # A build such as 2.13.0+cpu is of its release.
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0].partition("b")[0])[:4])


def clocks(offsets: Mapping[str, ClockOffset], max_skew_us: int) -> list[Diagnosis]:
    """The clock of each other process minus ours. Judged is what the error of an offset does not explain."""
    if not offsets:
        return [Diagnosis("clocks", Verdict.SKIP, "no process tells its time")]
    worst, offset = max(offsets.items(), key=lambda each: each[1].least_us)
    mend = "synchronise the clocks of the machines (chrony or ntpd)"
    if offset.least_us > LARGEST_OFFSET_US:
        return [Diagnosis("clocks", Verdict.FAIL, _apart(worst, offset), mend)]
    if offset.least_us > max_skew_us:
        return [Diagnosis("clocks", Verdict.WARN, f"{_apart(worst, offset)}, over worker.max_clock_skew_ms", mend)]
    known = {name: each for name, each in offsets.items() if each.error_us <= LARGEST_OFFSET_US}
    unknown = {name: each for name, each in offsets.items() if name not in known}
    found = []
    if known:
        worst, offset = max(known.items(), key=lambda each: abs(each[1].offset_us))
        found.append(Diagnosis("clocks", Verdict.OK, f"{len(known)} compared: {_apart(worst, offset)}"))
    if unknown:
        worst, offset = max(unknown.items(), key=lambda each: abs(each[1].offset_us))
        what = f"{len(unknown)} cannot be compared, their messages may be late: {_apart(worst, offset)}"
        found.append(Diagnosis("clocks", Verdict.SKIP, what))
    return found


def _apart(name: str, offset: ClockOffset) -> str:
    error_ms = offset.error_us / 1000
    return f"the clock of {name} is {offset.offset_us / 1000:+.1f} ms from ours (+/- {error_ms:.1f} ms)"


def throttling(held_back_s: Mapping[str, float]) -> list[Diagnosis]:
    """The longest time for which a broker lately held back an answer to each process, 0 for never."""
    mend = (
        "raise the quota of their users or client ids, or remove it: `kafka-configs.sh --describe --entity-type users "
        f"(or clients) --entity-default` shows those that hold for all; see {THROTTLED.page}"
    )
    found = judge_conditions(Seen(held_back_s=held_back_s))
    return [Diagnosis("quotas", Verdict.WARN, each.text, mend) for each in found]


def traffic(problems: Sequence[Finding], ended: int, within_s: float) -> list[Diagnosis]:
    """What the live page says of some seconds, in which `ended` ranking requests ended. What the checks of workers and
    quotas have told is left out.
    """
    unread = [each.text for each in problems if each.name == UNREAD.name]
    if unread:
        return [Diagnosis("traffic", Verdict.SKIP, f"not followed: {unread[0]}")]
    told = (NO_WORKER.name, THROTTLED.name)
    found = [
        Diagnosis("traffic", Verdict.WARN, each.text, f"see {each.page}") for each in problems if each.name not in told
    ]
    what = f"{ended} ranking requests ended within {within_s:g} s, and nothing is wrong with them"
    if not ended:
        what = f"no ranking request ended within {within_s:g} s, and nothing else is wrong"
    return found or [Diagnosis("traffic", Verdict.OK, what)]


def memory(free_bytes: int, needed_bytes: int) -> list[Diagnosis]:
    """`needed_bytes`: of a worker with these settings, without its weights."""
    what = f"{_gib(free_bytes)} free, a worker with these settings takes about {_gib(needed_bytes)} and its weights"
    if needed_bytes > free_bytes * HEADROOM:
        mend = "lower worker.dram_bytes (on a CPU also worker.hbm_bytes), or free memory"
        return [Diagnosis("memory", Verdict.WARN, what, mend)]
    return [Diagnosis("memory", Verdict.OK, what)]


def shared_memory(seen: SeenFolder, dram_bytes: int) -> list[Diagnosis]:
    """Room for the DRAM tier that outlives a worker."""
    what = f"{seen.path} has {_gib(seen.free_bytes)} free, the DRAM tier takes {_gib(dram_bytes)}"
    if dram_bytes > seen.free_bytes:
        mend = "enlarge the tmpfs (mount -o remount,size=...; in a container --shm-size), or lower worker.dram_bytes"
        return [Diagnosis("shared memory", Verdict.WARN, what, mend)]
    if not seen.is_memory:
        mend = "set worker.shared_path to a folder on a tmpfs such as /dev/shm"
        return [Diagnosis("shared memory", Verdict.WARN, f"{seen.path} is not on a tmpfs", mend)]
    return [Diagnosis("shared memory", Verdict.OK, what)]


def pool(url: StoreUrl, lack: str | None, unreachable: str | None) -> list[Diagnosis]:
    """`lack` and `unreachable`: as the methods of the `StoreModule` say."""
    if lack is not None:
        what, _, mend = lack.partition(": ")
        return [Diagnosis("pool", Verdict.FAIL, what, mend)]
    if unreachable is not None:
        what, _, mend = unreachable.partition(": ")
        mend = f"{mend}; until then workers compute"
        return [Diagnosis("pool", Verdict.WARN, f"{what} (worker.pool.store)", mend)]
    return [Diagnosis("pool", Verdict.OK, f"{url.text} can be reached")]


def open_files(limit: int, connections: int) -> list[Diagnosis]:
    """`connections`: the most that the HTTP gateway accepts."""
    wanted = max(LEAST_FILES, 2 * connections)
    if limit < wanted:
        what = f"a process may have {limit} open files, wanted are {wanted}"
        return [Diagnosis("limits", Verdict.WARN, what, f"ulimit -Hn {wanted} (systemd: LimitNOFILE={wanted})")]
    return [Diagnosis("limits", Verdict.OK, f"a process may have {limit} open files")]


def pre_infer_workers(seen: Sequence[SeenWorker], is_wanted: bool) -> list[Diagnosis]:
    """Pre-infer workers, if a scenario wants them or there are any."""
    ready = [each.worker_id for each in seen if each.is_fresh and each.is_pre_infer]
    if not is_wanted:
        mend = "set `pre_infer: pool` of a scenario in the trigger's settings, or stop them"
        what = f"{_some(ready)} get no jobs: every scenario has `pre_infer: owner`"
        return [Diagnosis("pre-infer", Verdict.WARN, what, mend)] if ready else []
    if not ready:
        mend = "start one with `relaygr worker --role pre-infer`"
        return [Diagnosis("pre-infer", Verdict.WARN, "no pre-infer worker is ready: the owners compute", mend)]
    if idle := [each.worker_id for each in seen if each.worker_id in ready and not each.has_slots]:
        what = f"{_some(idle)} can take no jobs: the pool is away, or Kafka gives them no partition of their group"
        mend = "see `/readyz` of the worker, and the warnings of `relaygr topics check` about share groups"
        return [Diagnosis("pre-infer", Verdict.WARN, what, mend)]
    return [Diagnosis("pre-infer", Verdict.OK, f"ready: {_some(ready)}")]


def workers(seen: Sequence[SeenWorker], partitions: int) -> list[Diagnosis]:
    """Live workers that rank, and partitions without an owner."""
    fresh = [each for each in seen if each.is_fresh and not each.is_pre_infer]
    silent = [f"{each.worker_id} ({each.state}, {each.age_s:.0f} s ago)" for each in seen if not each.is_fresh]
    found = []
    if silent:
        found.append(
            Diagnosis(
                "workers",
                Verdict.WARN,
                f"not ready: {_some(silent)}",
                "look at their logs; `relaygr worker leave ID` for one that has gone for good",
            )
        )
    if not fresh:
        mend = f"start one with `relaygr worker`; see {NO_WORKER.page}"
        return [*found, Diagnosis("workers", Verdict.FAIL, NO_WORKER.sentence, mend)]
    found.insert(0, Diagnosis("workers", Verdict.OK, f"ready: {_some([each.worker_id for each in fresh])}"))
    owned = frozenset[int]().union(*(each.partitions for each in fresh))
    ownerless = sorted(frozenset(range(partitions)) - owned)
    if ownerless:
        found.append(
            Diagnosis(
                "partitions",
                Verdict.FAIL,
                f"{len(ownerless)} of {partitions} have no owner: {_some([str(each) for each in ownerless])}",
                "wait some seconds after a start or stop; else start a worker, or the one that owned them",
            )
        )
    else:
        found.append(Diagnosis("partitions", Verdict.OK, f"each of {partitions} has an owner"))
    return found


def trigger(members: Sequence[str] | None, is_enabled: bool) -> list[Diagnosis]:
    """The members of the trigger's group; None if the cluster does not tell them."""
    if members is None:
        return [Diagnosis("trigger", Verdict.SKIP, "the members of its group are unknown: see `relaygr lag`")]
    if members:
        what = f"{len(members)} running" if is_enabled else f"{len(members)} running, and trigger.enabled is false"
        return [Diagnosis("trigger", Verdict.OK, what)]
    mend = "start one with `relaygr trigger`"
    return [Diagnosis("trigger", Verdict.WARN, "none runs: every ranking request is full inference", mend)]


def impression(undelivered: str | None, outcome: RankOutcome) -> list[Diagnosis]:
    """How one impression ended: its event, and its ranking request. `undelivered`: why the event was not delivered."""
    found = []
    if undelivered is not None:
        what, _, mend = _LIBRARY.sub("", undelivered).partition(": ")
        mend = mend or "look at the topics and at the brokers' logs"
        found.append(Diagnosis("impression", Verdict.FAIL, f"the retrieval event was not delivered: {what}", mend))
    if outcome.status is Ended.RANKED and outcome.result is not None:
        what = f"ranked by {outcome.result.worker_id} in {outcome.latency_us / 1000:.1f} ms"
        return [*found, Diagnosis("impression", Verdict.OK, what)]
    detail = outcome.result.detail if outcome.result is not None else None
    reason = str(outcome.reason) if outcome.reason is not None else ""
    what = ": ".join(text for text in (f"the ranking request ended as {outcome.status}", reason, detail) if text)
    mend = "look at the log of the worker that owns the partition"
    if outcome.status is Ended.EXPIRED:
        mend = "compare the clocks of the machines"
    elif outcome.reason is Reason.REFUSED_BY_KAFKA:
        mend = "look at the line that begins with `kafka refuses messages`"
    elif outcome.reason is Reason.OVERLOADED:
        return [*found, Diagnosis("impression", Verdict.WARN, what, "add workers, or send less")]
    return [*found, Diagnosis("impression", Verdict.FAIL, what, mend)]


def _some(names: Sequence[str], most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.2f} GiB"
