"""The speed of the machine during a run."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import pytest

from relaygr.bench.rows import machine
from relaygr.bench.speed import FixedWork, MachineSpeed
from relaygr.runtime.errors import RelayError


@pytest.fixture
def times_us(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What the fixed work takes, the last value again and again."""
    times = [100.0]
    monkeypatch.setattr(FixedWork, "cpu_us", lambda _: times.pop(0) if len(times) > 1 else times[0])
    monkeypatch.setattr("relaygr.bench.speed.INTERVAL_S", 0.001)
    monkeypatch.setattr("relaygr.bench.speed.QUIET_S", 0.02)
    monkeypatch.setattr("relaygr.bench.speed.WINDOW_S", 0.0)
    return times


def test_fixed_work_takes_cpu_time() -> None:
    assert FixedWork().cpu_us() > 0


def test_a_run_is_compared_with_the_quiet_machine_of_its_folder(tmp_path: Path, times_us: list[float]) -> None:
    assert MachineSpeed(tmp_path).slowdown(0.0) == 1.0
    times_us[:] = [150.0]
    again = MachineSpeed(tmp_path)
    assert again.slowdown(0.0) == pytest.approx(1.5)
    with again.watch() as watch:
        pass
    assert watch.slowdown_since(0.0) == pytest.approx(1.5)


def test_only_what_was_measured_since_a_time_counts(tmp_path: Path, times_us: list[float]) -> None:
    speed = MachineSpeed(tmp_path)
    times_us[:] = [300.0]
    with speed.watch() as watch:
        time.sleep(0.02)
        begin_s = time.monotonic()
        times_us[:] = [200.0]
        time.sleep(0.02)
    assert watch.slowdown_since(begin_s) == pytest.approx(2.0)
    assert math.isnan(watch.slowdown_since(time.monotonic()))


def test_a_run_waits_until_the_machine_is_quiet_but_not_for_ever(tmp_path: Path, times_us: list[float]) -> None:
    speed, told = MachineSpeed(tmp_path), list[float]()
    times_us[:] = [150.0, 120.0, 110.0, 150.0]
    speed.wait_until_quiet(60.0, told.append)
    assert told == pytest.approx([1.5, 1.2])
    speed.wait_until_quiet(0.01)
    assert speed.slowdown(0.0) == pytest.approx(1.5)


def test_a_machine_that_is_never_quiet_is_waited_for_ever_shorter(
    tmp_path: Path, times_us: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    speed, clock_s = MachineSpeed(tmp_path), [0.0]

    def slowdown(_: float) -> float:
        clock_s[0] += 1.0
        return times_us[0] / 100

    monkeypatch.setattr(speed, "slowdown", slowdown)
    monkeypatch.setattr("time.monotonic", lambda: clock_s[0])

    def waited_s() -> float:
        began_s = clock_s[0]
        speed.wait_until_quiet(16.0)
        return clock_s[0] - began_s

    times_us[:] = [150.0]
    speed.wait_until_quiet(0.0)
    assert clock_s == [0.0], "no time is no wait in vain"
    assert [waited_s() for _ in range(6)] == [16, 8, 4, 2, 2, 2]
    times_us[:] = [100.0]
    assert waited_s() == 1, "one look"
    times_us[:] = [150.0]
    assert waited_s() == 16, "it was quiet since"


def test_the_watch_uses_hardly_any_cpu_time(tmp_path: Path) -> None:
    speed = MachineSpeed(tmp_path)
    began_s, began_cpu_s = time.monotonic(), time.process_time()
    with speed.watch():
        time.sleep(1.0)
    assert time.process_time() - began_cpu_s < 0.1 * (time.monotonic() - began_s), "one thread, now and then"


def test_bursts_of_others_while_the_quiet_time_is_measured_do_not_count(tmp_path: Path, times_us: list[float]) -> None:
    times_us[:] = [*[100.0, 200.0, 200.0] * 8, 200.0]
    speed = MachineSpeed(tmp_path)
    times_us[:] = [100.0]
    assert speed.slowdown(0.0) == 1.0


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ({"machine": "another", "quiet_us": 1.0}, "was made on another"),
        ({"machine": machine()}, "does not have the speed of a machine: KeyError"),
        ([], "does not have the speed of a machine: TypeError"),
    ],
)
def test_a_file_of_something_else_is_refused(tmp_path: Path, content: object, why: str) -> None:
    (tmp_path / "speed.json").write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(RelayError, match=why):
        MachineSpeed(tmp_path)
