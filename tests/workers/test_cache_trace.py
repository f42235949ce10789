"""Traces of cache operations: their content, and the limits of the recording's side effects."""

from __future__ import annotations

import threading
from io import FileIO
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from relaygr.runtime.errors import RelayError
from relaygr.schemas.digest import digest_chain
from relaygr.schemas.messages import LatencyCoefficients
from relaygr.worker.cache import Purpose
from relaygr.worker.cache.events import CacheEvent, EventKind
from relaygr.worker.cache.policies import PolicyName
from relaygr.worker.cache.trace import (
    Sketch,
    TraceHeader,
    TraceReader,
    TraceRecord,
    TraceRecorder,
    encode_header,
    encode_record,
    recorder,
    sketch_of,
)
from relaygr.worker.kv import DramGeometry, DramKvDtype
from tests.worlds.cache import GEOMETRY, LAYOUT, CacheWorld, history, make_key

HEADER = TraceHeader(
    geometry=DramGeometry(GEOMETRY, DramKvDtype.INT8),
    layout=LAYOUT,
    hbm_pages=32,
    dram_pages=64,
    hbm_policy=PolicyName.SLRU,
    dram_policy=PolicyName.TTL,
    ttl_us=5,
    latency=LatencyCoefficients(*map(float, range(11))),
)


class Recording:
    """A cache, and a recorder that writes its operations to a file."""

    def __init__(self, path: Path, max_bytes: int = 1 << 20) -> None:
        self.path = path
        self.registry = CollectorRegistry()
        self.recorder = TraceRecorder(path, max_bytes, self.registry)
        self.world = CacheWorld(listener=self.recorder.on_event)

    def counted(self, outcome: str) -> float:
        return self.registry.get_sample_value("relaygr_cache_trace_events_total", {"outcome": outcome}) or 0.0

    def records(self) -> list[TraceRecord]:
        return list(TraceReader(self.path).records())


@pytest.fixture
def recording(tmp_path: Path) -> Recording:
    return Recording(tmp_path / "cache.trace")


class TestRecording:
    def test_every_operation_is_written_in_order_and_read_as_it_was(self, recording: Recording) -> None:
        recording.recorder.start(HEADER)
        world, key = recording.world, make_key(length=100)
        world.cache.acquire(key, 1_000, purpose=Purpose.PRE_INFER)
        world.store(key, 1_100)
        world.cache.release(world.hit(key, 1_250))
        world.cache.transfers.spill(key)
        world.mover.run()
        world.cache.invalidate_user("ann")
        recording.recorder.close()
        assert TraceReader(recording.path).header == HEADER
        records = recording.records()
        assert [(record.kind, record.at_us, record.outcome) for record in records] == [
            (EventKind.PREPARE, 0, "absent"),
            (EventKind.RESERVE, 100, "fill"),
            (EventKind.PUBLISH, 100, "published"),
            (EventKind.ACQUIRE, 250, "hit"),
            (EventKind.SPILL, 250, "started"),
            (EventKind.SPILLED, 250, "published"),
            (EventKind.INVALIDATE, 250, "hbm"),
            (EventKind.INVALIDATE, 250, "dram"),
        ]
        assert {record.sketch for record in records} == {sketch_of(key.chain, recording.recorder._key)}
        assert recording.counted("written") == 8

    def test_no_user_id_is_written_and_one_user_has_one_number_in_one_trace(self, tmp_path: Path) -> None:
        users = []
        for number in (1, 2):
            recording = Recording(tmp_path / f"trace-{number}")
            recording.recorder.start(HEADER)
            for user in ("ann.smith@mail.example", "bob", "ann.smith@mail.example"):
                recording.world.cache.acquire(make_key(user), 1)
            recording.recorder.close()
            assert b"ann.smith" not in recording.path.read_bytes()
            users.append([record.user for record in recording.records()])
        for first, other, again in users:
            assert first == again != other
        assert users[0][0] != users[1][0], "the same key twice: traces of two days could be joined"

    def test_no_digest_of_a_history_is_written(self, recording: Recording) -> None:
        recording.recorder.start(HEADER)
        chains = [make_key(length=length).chain for length in (1, 64, 200)]
        for length in (1, 64, 200):
            recording.world.cache.acquire(make_key(length=length), 1)
        recording.recorder.close()
        written = recording.path.read_bytes()
        assert all(digest[:4] not in written for chain in chains for digest in (chain.seed, *chain.blocks))

    def test_a_full_queue_drops_and_counts_and_does_not_block(
        self, recording: Recording, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(recorder, "QUEUE_EVENTS", 10)
        going = threading.Event()
        write = recording.recorder._write
        monkeypatch.setattr(recording.recorder, "_write", lambda *args: going.wait(30) and write(*args))
        recording.recorder.start(HEADER)
        for now_us in range(100):
            recording.world.cache.acquire(make_key(), now_us)
        dropped = recording.counted("dropped")
        going.set()
        recording.recorder.close()
        assert 80 <= dropped <= 90
        assert recording.counted("written") == len(recording.records()) == 100 - dropped

    def test_events_that_arrive_out_of_order_are_written_in_the_order_of_the_operations(
        self, recording: Recording, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        begun, going, write = threading.Event(), threading.Event(), recording.recorder._write

        def held_up(*args: Any) -> bool:
            begun.set()
            assert going.wait(30)
            return write(*args)

        monkeypatch.setattr(recording.recorder, "_write", held_up)
        recording.recorder.start(HEADER)
        for sequence in (0, 3, 1, 2):
            event = CacheEvent(sequence, sequence, EventKind.ACQUIRE, "ann", b"model", make_key().chain, "hit")
            recording.recorder.on_event(event)
            assert begun.wait(30)
        going.set()
        recording.recorder.close()
        assert [record.at_us for record in recording.records()] == [0, 1, 2, 3]

    def test_a_full_file_ends_the_recording_and_holds_whole_records(self, tmp_path: Path) -> None:
        recording = Recording(tmp_path / "small.trace", max_bytes=2_000)
        recording.recorder.start(HEADER)
        for now_us in range(500):
            recording.world.cache.acquire(make_key(), now_us)
        recording.recorder.close()
        assert recording.path.stat().st_size <= 2_000
        assert 0 < len(recording.records()) == recording.counted("written")
        assert recording.counted("written") + recording.counted("dropped") == 500

    def test_a_disk_that_fails_ends_the_recording_not_the_worker(
        self, recording: Recording, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*_: object) -> bool:
            raise OSError(28, "No space left on device")

        recording.recorder.start(HEADER)
        monkeypatch.setattr(recording.recorder, "_write", fail)
        for now_us in range(10):
            recording.world.cache.acquire(make_key(), now_us)
        recording.recorder.close()
        assert recording.counted("dropped") == 10

    def test_no_record_follows_one_that_was_written_in_part(
        self, recording: Recording, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A raw file may write only a part. Records after a torn one could never be read."""

        class FullDisk(FileIO):
            def write(self, data: object) -> int | None:
                return super().write(bytes(data)[: 1_500 - self.tell()])  # type: ignore[call-overload]

        monkeypatch.setattr(recorder, "FileIO", FullDisk)
        recording.recorder.start(HEADER)
        for now_us in range(2_000):
            recording.world.cache.acquire(make_key(), now_us)
        recording.recorder.close()
        assert recording.counted("dropped") == 2_000
        assert all(record.kind is EventKind.ACQUIRE for record in recording.records())

    def test_before_start_and_after_close_nothing_is_recorded(self, recording: Recording) -> None:
        recording.world.cache.acquire(make_key(), 1)
        assert not recording.path.exists()
        recording.recorder.start(HEADER)
        recording.world.cache.acquire(make_key(), 2)
        recording.recorder.close()
        recording.world.cache.acquire(make_key(), 3)
        recording.recorder.close()
        assert len(recording.records()) == 1

    def test_a_standby_without_requests_does_not_touch_the_file(self, tmp_path: Path) -> None:
        active, standby = Recording(tmp_path / "cache.trace"), Recording(tmp_path / "cache.trace")
        active.recorder.start(HEADER)
        active.world.cache.acquire(make_key(), 1)
        standby.recorder.start(HEADER)
        standby.recorder.close()
        active.recorder.close()
        assert [each.name for each in tmp_path.iterdir()] == ["cache.trace"]
        assert len(active.records()) == 1

    def test_one_earlier_trace_is_kept(self, tmp_path: Path) -> None:
        path = tmp_path / "cache.trace"
        for now_us in (1, 2, 3):
            recording = Recording(path)
            recording.recorder.start(HEADER)
            for _ in range(now_us):
                recording.world.cache.acquire(make_key(), now_us)
            recording.recorder.close()
        assert sorted(each.name for each in tmp_path.iterdir()) == ["cache.trace", "cache.trace.1"]
        assert len(list(TraceReader(tmp_path / "cache.trace.1").records())) == 2

    def test_a_missing_folder_is_refused_at_the_start(self, tmp_path: Path) -> None:
        with pytest.raises(RelayError, match=r"worker\.cache_trace .*nowhere"):
            Recording(tmp_path / "nowhere" / "cache.trace")


class TestReading:
    def test_a_torn_last_record_is_left_out_wherever_it_is_torn(self, recording: Recording, tmp_path: Path) -> None:
        recording.recorder.start(HEADER)
        for now_us in range(3):
            recording.world.cache.acquire(make_key(), now_us)
        recording.recorder.close()
        whole, torn = recording.path.read_bytes(), tmp_path / "torn.trace"
        counts = []
        for end in range(len(encode_header(HEADER)), len(whole) + 1):
            torn.write_bytes(whole[:end])
            counts.append(len(list(TraceReader(torn).records())))
        assert counts == sorted(counts)
        assert set(counts) == {0, 1, 2, 3}

    def test_it_is_readable_while_it_is_written(self, recording: Recording) -> None:
        recording.recorder.start(HEADER)
        recording.world.cache.acquire(make_key(), 1)
        deadline = threading.Event()
        for _ in range(1000):
            if recording.counted("written"):
                break
            deadline.wait(0.01)
        assert len(recording.records()) == 1
        recording.recorder.close()

    @pytest.mark.parametrize(
        ("content", "says"),
        [
            (b"", "empty"),
            (b"user,item\n1,2\n", "not a trace"),
            (msgpack.packb({"format": "relaygr-cache-trace", "version": 9}), "version 9"),
            (msgpack.packb({"format": "relaygr-cache-trace", "version": 1}), "header is not complete"),
            (b"\xc1\xc1\xc1", "not a trace"),
        ],
    )
    def test_a_file_that_is_no_trace_is_refused_with_the_reason(
        self, tmp_path: Path, content: bytes, says: str
    ) -> None:
        path = tmp_path / "x"
        path.write_bytes(content)
        with pytest.raises(RelayError, match=says):
            TraceReader(path)

    @pytest.mark.parametrize("bits", [0x01, 0x40, 0xFF])
    def test_a_changed_byte_is_reported_wherever_it_is(self, tmp_path: Path, bits: int) -> None:
        """A changed time once stretched a trace to 54,324,732,295 s, and the replay ended with 0."""
        records = [
            TraceRecord(EventKind.ACQUIRE, 1000 * each, 7 + each, b"made", Sketch(64, b"12345678"), "hit")
            for each in range(100)
        ]
        header, parts = encode_header(HEADER), [encode_record(each) for each in records]
        whole, path = header + b"".join(parts), tmp_path / "x"
        path.write_bytes(whole)
        assert list(TraceReader(path).records()) == records
        for place in range(len(header) + len(b"".join(parts[:3]))):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ bits]) + whole[place + 1 :])
            with pytest.raises(RelayError):
                list(TraceReader(path).records())

    def test_a_trace_of_the_version_without_checksums_is_read(self, tmp_path: Path) -> None:
        record = TraceRecord(EventKind.ACQUIRE, 1000, 7, b"made", Sketch(64, b"12345678"), "hit")
        header = msgpack.unpackb(encode_header(HEADER))
        del header["checksum"]
        earlier = msgpack.packb({**header, "version": 1}) + msgpack.packb(msgpack.unpackb(encode_record(record))[:-1])
        (tmp_path / "x").write_bytes(earlier)
        assert list(TraceReader(tmp_path / "x").records()) == [record]

    def test_damage_in_the_middle_is_reported_with_its_place(self, recording: Recording) -> None:
        recording.recorder.start(HEADER)
        recording.world.cache.acquire(make_key(), 1)
        recording.recorder.close()
        with recording.path.open("ab") as file:
            file.write(msgpack.packb(["acquire", "soon"]) + b"\x00" * 10)
        with pytest.raises(RelayError, match="damaged at record 2"):
            recording.records()

    def test_a_missing_file_is_reported(self, tmp_path: Path) -> None:
        with pytest.raises(RelayError, match="No such file"):
            TraceReader(tmp_path / "none")


class TestSketch:
    @given(
        one=st.tuples(st.integers(0, 900), st.none() | st.integers(0, 900)),
        other=st.tuples(st.integers(0, 900), st.none() | st.integers(0, 900)),
    )
    def test_sketches_show_where_histories_diverge_within_a_factor_of_two(
        self, one: tuple[int, int | None], other: tuple[int, int | None]
    ) -> None:
        histories = [history(*one), history(*other)]
        sketches = [sketch_of(digest_chain(np.array([7], "<i8"), each), b"key") for each in histories]
        shorter = min(len(histories[0]), len(histories[1]))
        differing = np.flatnonzero(histories[0].items[:shorter] != histories[1].items[:shorter])
        truth = int(differing[0]) if differing.size else shorter
        told = sketches[0].common(sketches[1])
        assert told == sketches[1].common(sketches[0])
        if truth == shorter:
            assert told == shorter
        elif told != shorter:
            assert told <= truth < max(64, 2 * told)
        else:
            last_mark = 64 * 2 ** int(np.log2(shorter / 64)) if shorter >= 64 else 0
            assert truth >= last_mark, "only a change behind the last mark passes for growth"

    def test_a_record_is_small(self, recording: Recording) -> None:
        recording.recorder.start(HEADER)
        recording.recorder.on_event(
            CacheEvent(1, 1, EventKind.ACQUIRE, "ann", b"model", make_key(length=2048).chain, "partial_hit")
        )
        recording.recorder.close()
        assert recording.path.stat().st_size - len(encode_header(HEADER)) <= 90
