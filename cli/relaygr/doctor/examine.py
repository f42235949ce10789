"""The checks in their order. Each is bounded in time, so a frozen broker cannot hold up the others.

A check runs on a daemon thread. A check that does not end in time counts as a failure, and its thread is left running;
if it asked Kafka, the later checks that ask Kafka are skipped.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from confluent_kafka import KafkaException

from relaygr.admission.scenarios import uses_pool
from relaygr.client.clock_offset import ClockOffset
from relaygr.cluster.admin import check_topics
from relaygr.cluster.admin_process import CannotStart
from relaygr.cluster.rights import Role
from relaygr.doctor import judge, observe
from relaygr.doctor.judge import Diagnosis, SeenWorker, Verdict
from relaygr.runtime.errors import RelayError
from relaygr.runtime.limits import available_memory
from relaygr.runtime.masking import masked
from relaygr.runtime.open_files import highest_limit
from relaygr.settings import Settings

LOCAL_S: Final = 10.0
MODEL_S: Final = 60.0
KAFKA_S: Final = 15.0
PAGES_S: Final = 15.0
BESIDE_BYTES: Final = 768 * 1024 * 1024
"""Of a worker process on a CPU beside tiers, requests and weights: libraries, Kafka's queues, compiled products.

Its own plan has the exact figure (`relaygr_worker_bytes_at_most`), but needs torch.
"""
Look = Callable[[], Sequence[Diagnosis]]


@dataclass(slots=True)
class Examination:
    """One run of all checks. `roles`: those that this user must be able to have; empty: any."""

    settings: Settings
    roles: Sequence[Role] = ()
    sends_impression: bool = True
    is_stuck: bool = field(default=False, init=False)
    """Whether a check did not end in its time: its thread still runs."""
    _kafka_answers: bool = field(default=True, init=False)
    _is_embedded: bool = field(default=False, init=False)
    _topics_are_right: bool = field(default=False, init=False)
    _may_send: bool = field(default=True, init=False)
    _workers: list[SeenWorker] = field(default_factory=list, init=False)
    _offsets: dict[str, ClockOffset] = field(default_factory=dict, init=False)
    _held_back_s: dict[str, float] = field(default_factory=dict, init=False)

    def run(self) -> Iterator[Diagnosis]:
        """Each finding as soon as its check has ended."""
        settings = self.settings
        yield from self._bounded("versions", LOCAL_S, self._versions)
        connect_s = KAFKA_S + settings.connect_timeout_s
        for name, limit_s, look in (
            ("broker", connect_s, self._broker),
            ("topics", connect_s, self._topics),
            # One question after the other for each role; in a new cluster, groups have no coordinator at first.
            ("rights", 2 * connect_s, self._rights),
            ("trigger", connect_s, self._trigger),
            ("workers", connect_s, self._fleet),
        ):
            yield from self._with_kafka(name, limit_s, look)
        if self.sends_impression:
            yield from self._with_kafka("impression", connect_s + observe.BUDGET_MS / 1000, self._impression)
        yield from self._with_kafka("traffic", connect_s + observe.TRAFFIC_S, self._traffic)
        yield from self._bounded("quotas", PAGES_S, self._quotas)
        yield from judge.clocks(self._offsets, settings.worker.max_clock_skew_ms * 1000)
        yield from self._bounded(
            "model", MODEL_S, lambda: observe.checkpoint(settings.worker.model, settings.worker.ranker_modules)
        )
        yield from self._bounded("calibration", LOCAL_S, lambda: observe.calibration(settings.worker.calibration))
        yield from self._bounded("memory", LOCAL_S, self._memory)
        yield from self._bounded("shared memory", LOCAL_S, self._shared_memory)
        yield from self._bounded("pool", LOCAL_S, self._pool)
        yield from judge.open_files(highest_limit(), settings.gateway.max_connections)

    # -- the checks ----------------------------------------------------------------------------------

    def _versions(self) -> list[Diagnosis]:
        wanted = observe.requirements()
        return judge.versions(observe.installed(wanted), wanted)

    def _broker(self) -> list[Diagnosis]:
        seen = observe.broker(self.settings)
        self._is_embedded = seen.is_embedded
        return judge.broker(seen, self.settings.group_protocol)

    def _topics(self) -> list[Diagnosis]:
        report = check_topics(self.settings)
        self._topics_are_right = report.ok
        return judge.topics(report)

    def _rights(self) -> list[Diagnosis]:
        if self._is_embedded:
            return [Diagnosis("rights", Verdict.SKIP, "the embedded cluster has no rights")]
        diverts = self.settings.worker.divert
        wanted = judge.roles(self.roles, diverts) if self.roles else ()
        missing = observe.rights(self.settings, tuple(dict.fromkeys((*judge.roles((), diverts), *wanted))))
        self._may_send = not missing[Role.GATEWAY]
        return judge.rights(missing, wanted)

    def _trigger(self) -> list[Diagnosis]:
        members = None if self._is_embedded else observe.trigger_members(self.settings, self.settings.lag)
        return judge.trigger(members, self.settings.trigger.enabled)

    def _fleet(self) -> list[Diagnosis]:
        if not self._topics_are_right:
            return [Diagnosis("workers", Verdict.SKIP, "the topics are not as they must be")]
        self._workers = observe.fleet(self.settings, self.settings.worker.status_interval_ms)
        self._offsets = {each.worker_id: each.offset for each in self._workers if each.offset is not None}
        return [
            *judge.workers(self._workers, self.settings.partitions),
            *judge.pre_infer_workers(self._workers, uses_pool(self.settings.served)),
        ]

    def _impression(self) -> list[Diagnosis]:
        ready = [each for each in self._workers if each.is_fresh and not each.is_pre_infer]
        if not ready or not self._may_send:
            what = "no worker is ready" if not ready else "this user may not act as a gateway"
            return [Diagnosis("impression", Verdict.SKIP, f"not sent: {what}")]
        owned = frozenset[int]().union(*(each.partitions for each in ready))
        deployment = self.settings.deployment
        seen = observe.send_impression(self.settings, owned, deployment.scenario if deployment is not None else None)
        # Exact to half a round trip, unlike an offset from a status.
        self._offsets |= seen.offsets
        self._held_back_s["this process"] = seen.held_back_s
        return judge.impression(seen.undelivered, seen.outcome)

    def _traffic(self) -> list[Diagnosis]:
        if not self._topics_are_right:
            return [Diagnosis("traffic", Verdict.SKIP, "the topics are not as they must be")]
        shown = observe.traffic(self.settings, self.settings.ui)
        return judge.traffic(shown.problems, shown.latency.ended, observe.TRAFFIC_S)

    def _quotas(self) -> list[Diagnosis]:
        pages = {masked(url): url for url in self.settings.ui.scrape}
        if self.settings.ui.scrape_workers:
            # Also of one whose statuses Kafka holds back.
            lately = (each for each in self._workers if each.age_s < observe.SILENT_S)
            pages |= {each.worker_id: each.metrics_url for each in lately if each.metrics_url is not None}
        return judge.throttling(self._held_back_s | observe.held_back(pages))

    def _memory(self) -> list[Diagnosis]:
        worker = self.settings.worker
        on_cpu = worker.device == "cpu"
        needed = int(worker.dram_bytes) + int(worker.ranking_queue_bytes) + int(worker.preinfer_queue_bytes)
        needed += BESIDE_BYTES
        return judge.memory(available_memory().available_bytes, needed + (int(worker.hbm_bytes) if on_cpu else 0))

    def _shared_memory(self) -> list[Diagnosis]:
        worker = self.settings.worker
        return judge.shared_memory(observe.shared_folder(worker, self.settings.workers_group), int(worker.dram_bytes))

    def _pool(self) -> list[Diagnosis]:
        url = self.settings.worker.pool.url
        return judge.pool(url, *observe.pool(url)) if url is not None else []

    # -- bounds --------------------------------------------------------------------------------------

    def _with_kafka(self, name: str, limit_s: float, look: Look) -> Sequence[Diagnosis]:
        if not self._kafka_answers:
            return [Diagnosis(name, Verdict.SKIP, "Kafka does not answer")]
        found = self._bounded(name, limit_s, look)
        if self.is_stuck or (name == "broker" and found[0].verdict is Verdict.FAIL):
            self._kafka_answers = False
        return found

    def _bounded(self, name: str, limit_s: float, look: Look) -> Sequence[Diagnosis]:
        """What `look` finds; its failure if it raises, or does not end in time."""
        found: list[Sequence[Diagnosis]] = []

        def run() -> None:
            found.append(_outcome(name, look))

        thread = threading.Thread(target=run, name=f"doctor-{name}", daemon=True)
        thread.start()
        thread.join(limit_s)
        if found:
            return found[0]
        self.is_stuck = True
        mend = "run `relaygr model verify`" if name == "model" else "look at the brokers and at the network"
        verdict = Verdict.WARN if name == "model" else Verdict.FAIL
        return [Diagnosis(name, verdict, f"did not end within {limit_s:g} s", mend)]


def _outcome(name: str, look: Look) -> Sequence[Diagnosis]:
    try:
        return look()
    except RelayError as error:
        # Our errors say what is wrong, and then what to do.
        what, _, mend = str(error).rstrip(".").partition(". ")
        return [Diagnosis(name, Verdict.FAIL, what, mend)]
    except CannotStart as error:
        mend = "run it with the interpreter of a Python environment"
        return [Diagnosis(name, Verdict.WARN, observe.no_answer(error), mend)]
    except KafkaException as error:
        return [Diagnosis(name, Verdict.FAIL, observe.no_answer(error), "look at the brokers and at the network")]
    except ModuleNotFoundError as error:
        return [Diagnosis(name, Verdict.SKIP, f"{error.name} is not installed on this machine")]
    except Exception as error:  # The other checks go on.
        what = f"the check failed: {type(error).__name__}: {error}"
        return [Diagnosis(name, Verdict.FAIL, what, "look at what it names, or report it as a fault of RelayGR")]
