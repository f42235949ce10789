"""The gateway's records: every request ends as exactly one."""

from __future__ import annotations

import time
from concurrent.futures import Future
from types import SimpleNamespace

from relaygr.client import Ended
from relaygr.traffic.player import Player
from relaygr.traffic.population import SyntheticPopulation
from relaygr.traffic.records import LOST, OPEN, ImpressionRecord
from relaygr.traffic.settings import TrafficSettings

SETTINGS = TrafficSettings(
    duration_s=0.05, rate_per_s=100, settle_s=0, users=2, history_max=32, lead_median_ms=1, drain_s=0.1
)


class ForgetfulClient:
    """Answers the warm-up, and reports no outcome of any other request."""

    def __init__(self, on_late, on_lost):
        self.on_late, self.on_lost = on_late, on_lost
        self.ids = 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def new_request_id(self):
        self.ids += 1
        return f"g.i.{self.ids}"

    def publish_history(self, history):
        pass

    def publish_behaviours(self, event):
        pass

    def publish_retrieval(self, user_id, **fields):
        pass

    def submit_rank(self, user_id, candidates, **fields):
        future = Future()
        if "request_id" not in fields:
            future.set_result(SimpleNamespace(status=Ended.RANKED))
        return future

    def drain(self, timeout_s):
        time.sleep(timeout_s)
        return False


def test_a_request_whose_end_nobody_tells_is_recorded_as_lost():
    records: list[ImpressionRecord] = []
    gateway = Player(ForgetfulClient, SETTINGS, SyntheticPopulation(SETTINGS), records.append, lost_after_s=0)
    gateway.play()
    numbers = [record.number for record in records]
    assert numbers and sorted(numbers) == list(range(len(numbers)))
    assert {record.status for record in records} == {LOST}
    assert all(record.latency_us is None for record in records)


def test_a_stop_waits_no_longer_than_its_setting_for_requests_that_no_worker_answers():
    """With a client that reports lost requests after ten minutes, the player waited for them after SIGTERM."""
    records: list[ImpressionRecord] = []

    class StoppingClient(ForgetfulClient):
        def drain(self, timeout_s):
            gateway.stop()
            return super().drain(timeout_s)

    gateway = Player(StoppingClient, SETTINGS, SyntheticPopulation(SETTINGS), records.append, lost_after_s=600)
    gateway.play()
    assert {record.status for record in records} == {OPEN}
    assert all(record.late for record in records)


def test_a_stop_does_not_wait_for_a_place_among_the_reference_requests():
    records: list[ImpressionRecord] = []

    class StoppingClient(ForgetfulClient):
        def submit_rank(self, user_id, candidates, **fields):
            if "request_id" in fields:
                gateway.stop()
            return super().submit_rank(user_id, candidates, **fields)

    gateway = Player(StoppingClient, SETTINGS, SyntheticPopulation(SETTINGS), records.append, lost_after_s=600)
    gateway.replay(frozenset({0, 1}), 60_000, at_once=1)
    assert [record.status for record in records] == [OPEN]
