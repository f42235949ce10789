"""The gateway's records: every request ends as exactly one."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace

from relaygr.client import RankStatus
from relaygr.traffic.player import Player
from relaygr.traffic.population import SyntheticPopulation
from relaygr.traffic.records import LOST, ImpressionRecord
from relaygr.traffic.settings import TrafficSettings


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
            future.set_result(SimpleNamespace(status=RankStatus.RANKED))
        return future

    def drain(self, timeout_s):
        return False


def test_a_request_whose_end_nobody_tells_is_recorded_as_lost():
    settings = TrafficSettings(duration_s=0.05, rate_per_s=100, settle_s=0, users=2, history_max=32, lead_median_ms=1)
    records: list[ImpressionRecord] = []
    gateway = Player(ForgetfulClient, settings, SyntheticPopulation(settings), records.append)
    gateway.play()
    numbers = [record.number for record in records]
    assert numbers and sorted(numbers) == list(range(len(numbers)))
    assert {record.status for record in records} == {LOST}
    assert all(record.latency_us is None for record in records)
