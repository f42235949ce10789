"""The bridge between the pipeline and MLCommons' LoadGen, which sends the queries of a run and judges it.

A query is one impression: the bridge publishes its retrieval event, sends its ranking request after the lead time, and
completes the query when the whole answer comes in time. Any other query is completed a second after its deadline, so
it counts as late and cannot disappear. LoadGen draws samples at random, so its index is only a ticket: the n-th query
is the n-th impression of the schedule after the warm-up, for all systems. Its arrivals, percentiles and verdict are
those of the Server scenario (https://github.com/mlcommons/inference/tree/master/loadgen).

LoadGen counts from its own schedule and never flags that it sends late: its latency less the bridge's own says it.
"""

from __future__ import annotations

import heapq
import itertools
import json
import math
import os
import signal
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial, wraps
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Final, ParamSpec

import mlperf_loadgen
import typer

from relaygr.bench.headline.question import JUDGED_PERCENTILE, Judged, judged_path, summary_path
from relaygr.cli.options import ConfigOption, SetOption
from relaygr.client import RelayClient
from relaygr.demo.summary import percentile
from relaygr.runtime.errors import RelayError
from relaygr.runtime.interpreter import tune_interpreter
from relaygr.settings import load_settings
from relaygr.traffic.player import Player, Request, TimedCall
from relaygr.traffic.population import population_of
from relaygr.traffic.records import ImpressionRecord, RecordWriter, in_time
from relaygr.traffic.schedule import HISTORY_LEAD_US, Impression

_LATE_US: Final = 1_000_000
_SAMPLES: Final = 1024
"""Tickets that LoadGen draws from."""
_LEAST_AHEAD: Final = 3
P = ParamSpec("P")


def _or_exit(call: Callable[P, None]) -> Callable[P, None]:
    """Ends the process after an error: a query would never be completed, and LoadGen would wait for ever."""

    @wraps(call)
    def guarded(*arguments: P.args, **named: P.kwargs) -> None:
        try:
            call(*arguments, **named)
        except BaseException:
            traceback.print_exc()
            os._exit(1)

    return guarded


@dataclass(slots=True, eq=False)
class _Query:
    """A query under way."""

    ticket: int
    place: int
    """Its number in the run, from 0."""
    issued_us: int


class LoadgenPlayer(Player):
    """Plays the warm-up by its own schedule, and every later impression when LoadGen issues a query."""

    def __init__(self, *arguments: Any, warm_up_s: float, queries: int, **named: Any) -> None:
        """`warm_up_s`: of the schedule. `queries`: impressions after it that LoadGen issues."""
        super().__init__(*arguments, **named)
        self._warm_up_us, self._query_count = int(warm_up_s * 1e6), queries
        self._lead_us = int(self._settings.lead_median_ms * 1000)
        self._limit_us = self._lead_us + self._settings.budget_ms * 1000
        self._under_way: dict[int, _Query] = {}
        self._took_us: list[int] = [0] * queries
        self._sent_late_us: list[int] = [0] * queries
        self._calls: list[TimedCall] = []
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._has_ended = False
        self.judged: Judged | None = None
        self.summary = ""
        """LoadGen's, of the whole run."""

    def _play(self, stream: Iterator[Impression]) -> None:
        played = list(stream)
        first = sum(each.retrieval_us < self._warm_up_us for each in played)
        measured = played[first : first + self._query_count]
        if len(measured) < self._query_count:
            raise RelayError(f"the schedule ends after {len(measured)} of {self._query_count} impressions")
        # Made before: LoadGen's thread would be late for its next query.
        coming = deque(self._request_of(each, self._client.new_request_id()) for each in measured)
        super()._play(iter(played[:first]))
        # When the next query comes is LoadGen's secret, so a history is published some queries before its own.
        ahead = max(_LEAST_AHEAD, math.ceil(self._settings.rate_per_s * HISTORY_LEAD_US / 1e6))
        for impression in measured[:ahead]:
            self._publish_if_new(impression, 0)
        time.sleep(HISTORY_LEAD_US / 1e6)
        sender = threading.Thread(target=self._send, name="sender", daemon=True)
        sender.start()
        self.judged = self._measured(first, partial(self._issue, coming, iter(measured[ahead:])))
        with self._changed:
            self._has_ended = True
            self._changed.notify()
        sender.join()

    def _measured(self, first: int, issue: Callable[[list[Any]], None]) -> Judged:
        """Returns when all queries are completed."""
        settings, logs = mlperf_loadgen.TestSettings(), mlperf_loadgen.LogSettings()
        settings.scenario = mlperf_loadgen.TestScenario.Server
        settings.mode = mlperf_loadgen.TestMode.PerformanceOnly
        settings.server_target_qps = self._settings.rate_per_s
        settings.server_target_latency_ns = self._limit_us * 1000
        settings.server_target_latency_percentile = JUDGED_PERCENTILE
        settings.min_duration_ms, settings.min_query_count = 1, self._query_count
        settings.schedule_rng_seed = settings.sample_index_rng_seed = settings.qsl_rng_seed = self._settings.seed
        logs.enable_trace = True
        with TemporaryDirectory(prefix="relaygr-loadgen-") as name:
            logs.log_output.outdir = name
            system = mlperf_loadgen.ConstructSUT(issue, lambda: None)
            samples = mlperf_loadgen.ConstructQSL(_SAMPLES, _SAMPLES, lambda _: None, lambda _: None)
            mlperf_loadgen.StartTestWithLogSettings(system, samples, settings, logs)
            mlperf_loadgen.DestroyQSL(samples)
            mlperf_loadgen.DestroySUT(system)
            folder = Path(name)
            self.summary = (folder / "mlperf_log_summary.txt").read_text(encoding="utf-8")
            told = _told(folder / "mlperf_log_detail.txt")
            completed_us = _completed_us(folder / "mlperf_log_trace.json")
        lags_ms = [
            (abs(by_loadgen - by_bridge) + sent_late) / 1000
            for by_loadgen, by_bridge, sent_late in zip(completed_us, self._took_us, self._sent_late_us, strict=True)
        ]
        return Judged(
            verdict=str(told["result_validity"]),
            first=first,
            queries=int(told["result_query_count"]),
            over=int(told["result_overlatency_query_count"]),
            p50_ms=(told["result_50.00_percentile_latency_ns"] / 1000 - self._lead_us) / 1000,
            p99_ms=(told["result_99.00_percentile_latency_ns"] / 1000 - self._lead_us) / 1000,
            lag_p99_ms=percentile(lags_ms, 100 * JUDGED_PERCENTILE),
        )

    # -- on LoadGen's thread -----------------------------------------------------------------------

    @_or_exit
    def _issue(self, coming: deque[Request], later: Iterator[Impression], samples: list[Any]) -> None:
        now_us = time.monotonic_ns() // 1000
        for sample in samples:
            request = coming.popleft()
            query = _Query(sample.id, self._query_count - len(coming) - 1, now_us)
            number = request.impression.number
            self._under_way[number] = query
            calls: list[tuple[int, Callable[[int], object]]] = [
                (now_us, partial(self._begin_query, request)),
                (now_us + self._lead_us, partial(self._rank_query, query, request)),
                (now_us + self._limit_us + _LATE_US, partial(self._give_up, request)),
            ]
            if (upcoming := next(later, None)) is not None:
                calls.append((now_us, partial(self._publish_if_new, upcoming)))
            with self._changed:
                for at_us, make in calls:
                    heapq.heappush(self._calls, TimedCall(at_us, next(self._numbers), number, False, make))
                self._changed.notify()

    # -- on the sender's thread --------------------------------------------------------------------

    @_or_exit
    def _send(self) -> None:
        while (call := self._next_call()) is not None:
            call.make(call.at_us)

    def _next_call(self) -> TimedCall | None:
        """Waits until a call is due. None: the run has ended."""
        with self._changed:
            while not self._has_ended:
                left_us = self._calls[0].at_us - time.monotonic_ns() // 1000 if self._calls else _LATE_US
                if left_us <= 0:
                    return heapq.heappop(self._calls)
                self._changed.wait(left_us / 1e6)
        return None

    def _begin_query(self, request: Request, _: int) -> None:
        self._begin(request)

    def _give_up(self, request: Request, _: int) -> None:
        self._complete(request.impression.number)

    def _rank_query(self, query: _Query, request: Request, at_us: int) -> None:
        self._rank_on_schedule(request, at_us)
        self._sent_late_us[query.place] = request.sent_us - at_us

    def _publish_if_new(self, impression: Impression, _: int) -> None:
        if self._may_be_new(impression):
            self._publish_version(impression)

    # -- on the client's thread --------------------------------------------------------------------

    def _emit(self, record: ImpressionRecord) -> None:
        if in_time(record) and not record.history_stale:
            self._complete(record.number)
        super()._emit(record)

    @_or_exit
    def _complete(self, number: int) -> None:
        """Completes a query once, whoever comes first."""
        query = self._under_way.pop(number, None)
        if query is not None:
            self._took_us[query.place] = time.monotonic_ns() // 1000 - query.issued_us
            mlperf_loadgen.QuerySamplesComplete([mlperf_loadgen.QuerySampleResponse(query.ticket, 0, 0)])


def _told(path: Path) -> Mapping[str, Any]:
    """The keys and values of LoadGen's detailed log."""
    lines = (line.removeprefix(":::MLLOG ") for line in path.read_text(encoding="utf-8").splitlines())
    told = {each["key"]: each["value"] for each in map(json.loads, lines)}
    if told["num_errors"]:
        raise RelayError(f"LoadGen met an error: {told.get('error_runtime') or told.get('error_invalid_config')}")
    return told


def _completed_us(path: Path) -> list[float]:
    """The latency of each query from LoadGen's schedule, in the order in which they were issued."""
    found: dict[int, float] = {}
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            # The file is no JSON: strings are quoted twice.
            if line.startswith('{"name":"Sample"') and '"ph":"b"' in line:
                arguments = json.loads(line[line.index('"args":') + len('"args":') :].rstrip().rstrip(",")[:-1])
                found[arguments["sample_seq"]] = arguments["complete_ns"] / 1000
    return [found[place] for place in range(len(found))]


def main(
    records: Path,
    config: ConfigOption = None,
    overrides: SetOption = None,
    warm_up_s: Annotated[float, typer.Option(min=0)] = 0.0,
    queries: Annotated[int, typer.Option(min=1)] = 1,
) -> None:
    """Plays one run, and writes its records, LoadGen's summary and what it found."""
    settings = load_settings(config, overrides=overrides or ())
    writer = RecordWriter(records)
    player = LoadgenPlayer(
        partial(RelayClient, settings, settings.traffic.gateway_id, settings.client),
        settings.traffic,
        population_of(settings.traffic),
        writer.write,
        settings.client.lost_after_ms / 1000,
        warm_up_s=warm_up_s,
        queries=queries,
    )
    tune_interpreter()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # Python's own handler would wait for LoadGen.
    try:
        player.play()
    finally:
        writer.close()
    if writer.problem is not None:
        raise RelayError(writer.problem)
    assert player.judged is not None
    summary_path(records).write_text(player.summary, encoding="utf-8")
    judged_path(records).write_text(json.dumps(asdict(player.judged)), encoding="utf-8")


if __name__ == "__main__":
    from relaygr.cli.app import run

    run(main)
