"""What was on the device when a process ended: its successor runs that alone, and gives up what ended two processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from relaygr.runtime.private_files import map_private
from relaygr.schemas.ended import Reason
from relaygr.worker.executor.device_record import MOST_IDS, RECORD_BYTES, DeviceRecord, impression_id
from relaygr.worker.executor.work import JobOutcome
from relaygr.worker.settings import WorkerSettings
from tests.worlds.executor import ExecutorWorld

A, B = ("a", "1"), ("b", "1")
"""User and request."""


class Line:
    """The processes of one worker, one after the other, on one file."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "device"

    def next(self) -> DeviceRecord:
        record = DeviceRecord(map_private(self._path, RECORD_BYTES, "worker.shared_path"))
        record.begin()
        return record

    def next_world(self, **settings: object) -> ExecutorWorld:
        return ExecutorWorld(device_record=self.next(), **settings)

    def killed(self, world: ExecutorWorld, candidates: int | None = None) -> None:
        """The process ends in its first forward, or the first that has a request with so many candidates: the file
        keeps what it has then.
        """
        found: list[bytes] = []

        def end(requests: list[int]) -> None:
            if not found and (candidates is None or candidates in requests):
                found.append(self._path.read_bytes())

        world.engine.on_forward = end
        world.run()
        [left] = found
        with self._path.open("r+b") as file:
            file.write(left)


@pytest.fixture
def line(tmp_path: Path) -> Line:
    return Line(tmp_path)


class TestRecord:
    def test_what_was_on_the_device_at_the_end_is_accused(self, line: Line) -> None:
        line.next().note([impression_id(*A), impression_id(*B)])
        record = line.next()
        assert (record.ends(*A), record.ends(*B), record.ends("a", "2")) == (1, 1, 0)
        record.note([impression_id(*B)])
        assert (line.next().ends(*A), line.next().ends(*B)) == (1, 2)

    def test_a_piece_that_ended_is_not_accused(self, line: Line) -> None:
        record = line.next()
        record.note([impression_id(*A)])
        record.note([impression_id(*B)])
        found = line.next()
        assert (found.ends(*A), found.ends(*B)) == (0, 1)

    def test_a_device_that_has_nothing_left_accuses_nobody(self, line: Line) -> None:
        record = line.next()
        record.note([impression_id(*A)])
        record.clear()
        assert not line.next().any_accused

    def test_a_file_of_another_version_is_as_none(self, line: Line, tmp_path: Path) -> None:
        line.next().note([impression_id(*A)])
        (tmp_path / "device").write_bytes(b"relaygr.device.0" + b"\xff" * (RECORD_BYTES - 16))
        assert not line.next().any_accused
        line.next().note([impression_id(*A)])
        assert line.next().ends(*A) == 1

    def test_of_too_many_the_newest_are_accused(self, line: Line) -> None:
        ids = [impression_id("a", str(number)) for number in range(2 * MOST_IDS)]
        line.next().note(ids[:MOST_IDS])
        line.next().note(ids[MOST_IDS : MOST_IDS + 8])
        record = line.next()
        ends = [record.ends("a", str(number)) for number in range(2 * MOST_IDS)]
        assert sum(ends) == MOST_IDS
        assert ends[MOST_IDS : MOST_IDS + 8] == [1] * 8

    def test_the_largest_batch_has_room(self) -> None:
        most = next(
            each.le for each in WorkerSettings.model_fields["max_batch_requests"].metadata if hasattr(each, "le")
        )
        assert most <= MOST_IDS


class TestExecutor:
    def test_a_request_that_ended_two_processes_is_answered_and_those_beside_it_are_ranked(self, line: Line) -> None:
        def asked(bad: int = 7) -> ExecutorWorld:
            """Three requests for one batch, of which that of user b ends the process."""
            world = line.next_world()
            for user, candidates in (("a", 4), ("b", bad), ("c", 5)):
                version = world.store.put(user, 100)
                world.rank(user, version, user, candidates=candidates)
            return world

        line.killed(asked(), 7)
        line.killed(asked(), 7)
        last = asked()
        last.run()
        assert set(last.outbox.answered) == {"a", "c"}
        [(work, reason, detail)] = last.outbox.failures
        assert (work.request.user_id, reason) == ("b", Reason.DEVICE_ERROR)
        assert "2 processes ended" in detail

    def test_what_was_beside_it_runs_alone_the_next_time(self, line: Line) -> None:
        def ready() -> ExecutorWorld:
            """Three requests that need nothing but their ranking pass."""
            world = line.next_world()
            versions = {user: world.store.put(user, 100) for user in "abc"}
            for request in ("before", "now"):
                world.engine.batches.clear()
                for user, version in versions.items():
                    world.rank(user, version, request, candidates=7 if request == "now" else 4)
                if request == "before":
                    world.run()
            return world

        first = ready()
        line.killed(first, 7)
        assert first.engine.batches == [3]
        second = ready()
        second.run()
        assert second.engine.batches == [1, 1, 1]
        assert not second.outbox.failures

    def test_a_chunk_that_was_on_the_device_runs_between_requests_that_are_ready(self, line: Line) -> None:
        first = line.next_world()
        first.job("b", first.store.put("b", 300))
        line.killed(first)
        world = line.next_world(mix_chunks=True)
        cached = world.store.put("a", 100)
        world.rank("a", cached, "before")
        world.run()
        world.job("b", world.store.put("b", 300))
        for number in range(30):
            world.rank("a", cached, f"request-{number}")
            world.executor.step()
        assert world.outbox.jobs == [JobOutcome.COMPUTED]
        assert world.engine.mixed == []

    def test_a_job_that_ended_two_processes_is_not_run(self, line: Line) -> None:
        for _ in range(2):
            world = line.next_world()
            world.job("a", world.store.put("a", 100))
            line.killed(world)
        world = line.next_world()
        world.job("a", world.store.put("a", 100))
        world.run()
        assert world.outbox.jobs == [JobOutcome.FAILED]
        assert world.engine.chunks == []
