"""Logs: one format for all loggers, JSON unless on a terminal, and limited repeats."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import structlog

from relaygr.runtime.logs import RepeatDecision, RepeatLimiter, configure_logging
from relaygr.runtime.settings import LogFormat, LogLevel, LogSettings

KEY = ("some.client", "connect to %s failed")
SECOND_US = 1_000_000


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    """A stream to log to. The fixture restores the logging configuration."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield io.StringIO()
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_structlog_event_is_one_json_line(stream: io.StringIO) -> None:
    configure_logging(stream=stream)
    structlog.get_logger("relaygr.lag").warning("lag is high", partition=3, seconds=1.5)
    (line,) = lines(stream)
    assert line.pop("timestamp").endswith("Z")
    assert line == {
        "event": "lag is high",
        "level": "warning",
        "logger": "relaygr.lag",
        "partition": 3,
        "seconds": 1.5,
    }


def test_what_libraries_log_takes_the_same_form(stream: io.StringIO) -> None:
    configure_logging(stream=stream)
    logging.getLogger("some.client").error("connect to %s failed", "broker:9092", extra={"attempt": 2})
    (line,) = lines(stream)
    assert line["event"] == "connect to broker:9092 failed"
    assert (line["level"], line["logger"], line["attempt"]) == ("error", "some.client", 2)


def test_an_exception_stays_on_its_line(stream: io.StringIO) -> None:
    configure_logging(stream=stream)
    try:
        raise KeyError("x")
    except KeyError:
        structlog.get_logger().exception("the device failed")
    (line,) = lines(stream)
    assert line["exception"].endswith("KeyError: 'x'")


def test_a_value_that_json_does_not_know_is_written_as_text(stream: io.StringIO) -> None:
    configure_logging(stream=stream)
    structlog.get_logger().info("read", key=b"\xff", member=LogLevel.INFO)
    assert lines(stream)[0]["key"] == r"b'\xff'"


def test_what_is_below_the_level_is_not_written(stream: io.StringIO) -> None:
    configure_logging(LogSettings(level=LogLevel.WARNING), stream)
    structlog.get_logger().info("quiet")
    logging.getLogger("faust").info("quiet")
    structlog.get_logger().warning("loud")
    assert [line["event"] for line in lines(stream)] == ["loud"]


def test_the_console_form_is_for_people(stream: io.StringIO) -> None:
    configure_logging(LogSettings(format=LogFormat.CONSOLE), stream)
    structlog.get_logger().info("ready", worker="worker-00")
    assert "ready" in stream.getvalue()
    assert "worker=worker-00" in stream.getvalue()
    assert "{" not in stream.getvalue()


def test_configuring_twice_writes_once(stream: io.StringIO) -> None:
    configure_logging(stream=io.StringIO())
    configure_logging(stream=stream)
    structlog.get_logger().info("once")
    assert len(lines(stream)) == 1


def test_a_repeated_message_is_cut_off_whatever_its_values(stream: io.StringIO) -> None:
    configure_logging(LogSettings(repeats_per_second=3), stream)
    for attempt in range(200):
        logging.getLogger("some.client").error("connect to %s failed", attempt)
        structlog.get_logger("streams").warning("broker is away", attempt=attempt)
    written = lines(stream)
    for logger in ("some.client", "streams"):
        # Three in each second that began; a loop of 200 is well under ten seconds on the slowest machine.
        assert 3 <= sum(line["logger"] == logger for line in written) <= 40


def test_a_limiter_admits_so_many_a_second_and_says_how_many_it_held_back() -> None:
    limiter = RepeatLimiter(per_second=2)
    assert [limiter.admit(KEY, now).admitted for now in (0, 1, 2, 3, 4)] == [True, True, False, False, False]
    assert limiter.admit(KEY, SECOND_US) == RepeatDecision(True, suppressed_before=3)
    assert limiter.admit(KEY, SECOND_US + 1) == RepeatDecision(True, suppressed_before=0)


def test_kinds_are_limited_apart() -> None:
    limiter = RepeatLimiter(per_second=1)
    assert limiter.admit(("a", "x"), 0).admitted
    assert limiter.admit(("a", "y"), 0).admitted
    assert limiter.admit(("b", "x"), 0).admitted
    assert not limiter.admit(("a", "x"), 0).admitted


def test_what_was_held_back_is_told_once_after_a_kind_goes_quiet() -> None:
    limiter = RepeatLimiter(per_second=1)
    for now in range(4):
        limiter.admit(KEY, now)
    assert limiter.take_overdue(SECOND_US - 1) == []
    assert limiter.take_overdue(SECOND_US) == [(KEY, 3)]
    assert limiter.take_overdue(2 * SECOND_US) == []


def test_a_limiter_remembers_a_bounded_number_of_kinds() -> None:
    limiter = RepeatLimiter(per_second=1, max_tracked=2)
    for name in ("a", "b", "c"):
        limiter.admit((name, ""), 0)
    assert not limiter.admit(("c", ""), 1).admitted
    assert limiter.admit(("a", ""), 1).admitted, "the least recently seen message was dropped"
