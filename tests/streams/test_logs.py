"""Logs: one format for all loggers, JSON unless on a terminal, and limited repeats."""

from __future__ import annotations

import fcntl
import io
import json
import logging
import os
import pty
import re
import socket
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import structlog

from relaygr.runtime.logs import RepeatDecision, RepeatLimiter, broken_between_words, configure_logging
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


COLOURED = (
    "\x1b[2m12:01:59\x1b[0m [\x1b[1minfo  \x1b[0m] \x1b[1ma segment is copied\x1b[0m "
    "[\x1b[34mrelaygr.worker.pool\x1b[0m] \x1b[36mkey\x1b[0m='a b c'"
)


@pytest.mark.parametrize("columns", [28, 40, 61, 80])
def test_a_long_line_is_broken_between_words(columns: int) -> None:
    broken = broken_between_words(COLOURED, columns)
    shown = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in broken.split("\n")]
    assert max(map(len, shown)) <= columns
    assert all(line.startswith("    ") for line in shown[1:])
    assert broken.split() == COLOURED.split(), "each word is whole"
    assert (len(shown) > 1) is (columns < 71)


def test_a_traceback_and_a_line_on_a_terminal_of_unknown_width_stay_as_they_are() -> None:
    assert broken_between_words(COLOURED, 0) == COLOURED
    text = "failed\nTraceback (most recent call last):\n    raise KeyError('a long text of many words')"
    assert broken_between_words(text, 20) == text
    assert broken_between_words("a-word-that-fits-in-no-line x", 10) == "a-word-that-fits-in-no-line\n    x"


def test_a_terminal_gets_lines_of_its_own_width() -> None:
    reader, writer = pty.openpty()
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 47, 0, 0))
    code = (
        "from relaygr.runtime.logs import configure_logging as c; import structlog; c(); "
        "structlog.get_logger('relaygr.some.module').info('something began', host='127.0.0.1', port=9301)"
    )
    try:
        subprocess.run([sys.executable, "-c", code], stderr=writer, check=True)
        shown = re.sub(r"\x1b\[[0-9;]*m", "", os.read(reader, 4096).decode())
    finally:
        os.close(reader)
        os.close(writer)
    assert max(map(len, shown.split("\r\n"))) <= 47
    assert {"[relaygr.some.module]", "host=127.0.0.1", "port=9301"} <= set(shown.split())


def test_an_exception_stays_on_its_line(stream: io.StringIO) -> None:
    configure_logging(stream=stream)
    try:
        raise KeyError("x")
    except KeyError:
        structlog.get_logger().exception("the device failed")
    (line,) = lines(stream)
    assert line["exception"].endswith("KeyError: 'x'")


def test_no_value_in_a_line_on_a_terminal_is_an_escape_sequence(stream: io.StringIO) -> None:
    configure_logging(LogSettings(format=LogFormat.CONSOLE), stream)
    odd = "\x1b[8mhidden\x07"
    structlog.get_logger().warning("a message cannot be used", key=odd, detail=f"it is {odd}")
    logging.getLogger("some.client").error("broker %s is away", odd)
    try:
        raise ValueError(odd)
    except ValueError:
        structlog.get_logger().exception("the step failed")
    text = stream.getvalue()
    assert not any(each in text for each in ("\x1b[8m", "\x07"))
    assert text.count("hidden") >= 4 and "Traceback (most recent call last):\n" in text


def test_a_traceback_on_a_terminal_shows_no_values_of_variables(stream: io.StringIO) -> None:
    """They hold users' data, and to print them all took a worker's thread seconds."""
    configure_logging(LogSettings(format=LogFormat.CONSOLE), stream)
    user = "a user's id"
    try:
        raise KeyError(len(user))
    except KeyError:
        structlog.get_logger().exception("the device failed")
    assert "KeyError: 11" in stream.getvalue()
    assert user not in stream.getvalue()


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


# -- a reader that does not read ----------------------------------------------------------------------

LOGS = """
import logging, sys, time
from relaygr.runtime.logs import configure_logging
from relaygr.runtime.settings import LogSettings

configure_logging(LogSettings(repeats_per_second=10**9))
log = logging.getLogger("loud")
for number in range(20_000):
    log.warning("line %d %s", number, "x" * 200)
print("logged", flush=True)
"""


def unread_pipe() -> tuple[int, int]:
    return os.pipe()


def unread_socket() -> tuple[int, int]:
    ours, theirs = socket.socketpair()
    return ours.detach(), theirs.detach()


def unread_terminal() -> tuple[int, int]:
    return pty.openpty()


@pytest.mark.slow
@pytest.mark.parametrize("unread", [unread_pipe, unread_socket, unread_terminal])
@pytest.mark.parametrize("blocks", [True, False])
def test_no_thread_waits_for_a_reader_of_standard_error_that_does_not_read(
    unread: Callable[[], tuple[int, int]], blocks: bool
) -> None:
    """Its end waits for nobody, either. `blocks` false: another process has set the pipe to non-blocking."""
    reader, writer = unread()
    os.set_blocking(writer, blocks)
    try:
        with subprocess.Popen(
            [sys.executable, "-c", LOGS], stdout=subprocess.PIPE, stderr=writer, text=True
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "logged\n"
            assert process.wait(60) == 0
    finally:
        os.close(reader)
        os.close(writer)


@pytest.mark.slow
def test_a_reader_that_comes_back_is_told_how_many_lines_it_missed() -> None:
    code = LOGS + "sys.stdin.read(1)\nlog.warning('last')\ntime.sleep(0.1)\n"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdin is not None and process.stderr is not None
        assert process.stdout.readline() == "logged\n"
        told = iter(process.stderr)
        written = []
        while not written or "dropped" not in written[-1]["event"]:
            written.append(json.loads(next(told)))
        dropped = written.pop()["lines"]
        assert written[0]["event"].startswith("line 0 ")
        assert len(written) <= 20_000 - dropped
        process.stdin.close()
        assert json.loads(list(told)[-1])["event"] == "last"
        assert process.wait(60) == 0


@pytest.mark.slow
def test_the_last_lines_before_the_end_are_written() -> None:
    code = "from relaygr.runtime.logs import configure_logging as c; import logging; c(); logging.error('the end')"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(run.stderr)["event"] == "the end"


@pytest.mark.slow
@pytest.mark.parametrize("reads", [True, False])
def test_an_error_is_the_last_line_and_the_process_ends_though_nobody_reads_it(reads: bool) -> None:
    code = LOGS + (
        "from relaygr.cli import app\nfrom relaygr.runtime.errors import RelayError\n"
        "def command():\n    raise RelayError('no memory')\n"
        "app.run(command)\n"
    )
    reader, writer = os.pipe()
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=writer, text=True) as process:
        os.close(writer)
        with os.fdopen(reader, encoding="utf-8") as said:
            lines = said.read().splitlines() if reads else []
            assert process.wait(60) == 1
    if reads:
        assert lines[-1] == "no memory"
