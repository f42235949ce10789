"""The command line in a terminal of 80 columns: help texts, tables and shell completion."""

from __future__ import annotations

import io
import itertools
import json
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text
from typer.testing import CliRunner

import relaygr.console
from relaygr.admission.fit import RankPoint
from relaygr.cli import COMMANDS, calibrate, model_bench
from relaygr.cli.app import app, load_command
from relaygr.cli.lag import Sort
from relaygr.cli.lag_view import exit_code, render
from relaygr.cli.texts import page, plain_console, stdout_console
from relaygr.lag.model import GroupMember
from relaygr.lag.report import GroupReport, LagReport, PartitionReport, TimeLag, TimeLagSource
from relaygr.lag.status import LagStatus
from relaygr.schemas.messages import LatencyCoefficients
from relaygr.settings import load_settings
from relaygr.simulate.visit import VisitTimes, break_even
from relaygr.worker.calibration import Calibration, MachineDescription, load_calibration
from relaygr.worker.kv import KvDtype
from relaygr.worker.model.options import ComputeDtype

WIDTH = 80


def call_lines() -> list[tuple[str, ...]]:
    """Every command and subcommand; the benchmarks are not installed everywhere."""

    def below(command: Any, words: tuple[str, ...]) -> list[tuple[str, ...]]:
        found = [words]
        for name, each in getattr(command, "commands", {}).items():
            found += below(each, (*words, name))
        return found

    return [words for name in COMMANDS if name != "bench" for words in below(load_command(name), (name,))]


@pytest.mark.parametrize("words", [(), *call_lines()], ids=" ".join)
def test_help_fills_its_lines_and_shows_no_type_for_flags(words: tuple[str, ...]) -> None:
    done = CliRunner().invoke(app, [*words, "--help"], env={"COLUMNS": str(WIDTH)})
    assert done.exit_code == 0, done.output
    lines = [line.rstrip() for line in done.output.splitlines()]
    assert max(map(len, lines)) <= WIDTH
    assert "<bool>" not in done.output
    text = lines[: next(at for at, line in enumerate(lines) if line.startswith("╭"))]
    for line, following in itertools.pairwise(text):
        if line and following and not line.startswith(" Usage"):
            assert len(line) + 1 + len(following.split()[0]) > WIDTH - 1, f"{line!r} ends early"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("relaygr la", {"lag"}),
        ("relaygr model be", {"bench"}),
        ("relaygr lag --ju", {"--judge"}),
        ("relaygr lag --sort s", {"seconds"}),
        ("relaygr lag --set lag.ok", {"lag.ok_messages="}),
    ],
)
def test_the_shell_completes_commands_options_and_settings(line: str, expected: set[str]) -> None:
    completion = {
        "_RELAYGR_COMPLETE": "complete_bash",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(line.split()) - 1),
    }
    done = CliRunner().invoke(app, [], env=completion, prog_name="relaygr")
    assert set(done.output.split()) == expected


# Tables


def printed(content: RenderableType, width: int = WIDTH) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(content)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def terminal() -> Console:
    return Console(file=io.StringIO(), width=WIDTH, height=24, force_terminal=True, color_system=None, highlight=False)


def row(
    partition: int, lag: int, status: LagStatus = LagStatus.JUDGING, topic: str = "relaygr.ranking-overflow"
) -> Any:
    owner = GroupMember("m", "c", "/gpu-worker-17.prod.example", "worker-07", frozenset())
    time_lag = TimeLag(12.3 if lag else 0.0, TimeLagSource.RECORD if lag else TimeLagSource.CAUGHT_UP)
    return PartitionReport(
        "relaygr.ranking-overflow", partition, 1_000_000, 1_000_000 + lag, lag, time_lag, owner, status
    )


def report(*rows: PartitionReport, status: LagStatus = LagStatus.JUDGING, split: tuple[int, ...] = ()) -> LagReport:
    behind = [each.lag or 0 for each in rows]
    longest = max((each.time_lag for each in rows if each.time_lag), key=lambda time: time.seconds)
    group = GroupReport(
        "relaygr.workers",
        "stable",
        "classic",
        "range",
        2,
        sum(behind),
        max(behind),
        longest,
        0,
        split,
        status,
        (),
        rows,
    )
    return LagReport("cluster", 0, 0, False, (group,))


SETTINGS = load_settings(environment={})


def shown(found: LagReport, width: int = WIDTH, every: bool = False, height: int | None = None) -> list[str]:
    return printed(render(found, SETTINGS, width, Sort.LAG, every, height), width).splitlines()


def test_lag_shows_a_summary_and_then_what_is_behind_the_most_first() -> None:
    lines = shown(report(row(0, 0, LagStatus.OK), row(1, 7), row(2, 70_000)))
    assert lines[0].startswith("relaygr.workers  JUDGING  70,007 messages behind, 12.3")
    assert lines[1] == "  stable, members: 2, classic protocol, range; 2 of 3 partitions are behind"
    rows = [line.split() for line in lines if "ranking-overflow" in line]
    assert [(each[1], each[2], each[4]) for each in rows] == [("2", "70000", "judging"), ("1", "7", "judging")]


def test_lag_fits_80_columns_and_has_offsets_where_there_is_room() -> None:
    found = report(*(row(partition, 123_456) for partition in range(3)))
    narrow, wide = shown(found), shown(found, 200)
    assert max(map(len, narrow)) <= WIDTH
    assert sum("123456" in line for line in narrow) == 3, "a row takes one line"
    assert "committed" not in "".join(narrow) and "committed" in "".join(wide)
    assert "worker-07@gpu-worker-17.prod.example" in "".join(wide)


def test_all_shows_partitions_without_lag_too() -> None:
    found = report(*(row(partition, 0, LagStatus.OK) for partition in range(4)), status=LagStatus.OK)
    assert not any("ranking-overflow" in line for line in shown(found))
    assert sum("ranking-overflow" in line for line in shown(found, every=True)) == 4


@pytest.mark.parametrize("partitions", [2, 500])
def test_a_watch_fits_the_height_of_the_terminal(partitions: int) -> None:
    lines = shown(report(*(row(partition, 5) for partition in range(partitions))), every=True, height=24)
    assert len(lines) <= 24
    assert any("more: enlarge" in line for line in lines) == (partitions == 500)


CLEARS = "\x1b[2J\x1b]0;title\x07\x9b31m"
"""What clears a screen, sets the title of its window and rings, and what some terminals take for a colour."""


def test_no_text_of_others_reaches_the_terminal_as_an_escape_sequence(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table("of others")
    table.add_row(Text(f"cell {CLEARS}"))
    table.add_row(f"string {CLEARS}")
    for stderr in (False, True):
        console = plain_console(stderr=stderr, width=200)
        console.print(f"line {CLEARS}\nnext line")
        console.print(Group(Text(f"text {CLEARS}"), table))
    printed = capsys.readouterr()
    for text in (printed.out, printed.err):
        assert not any(each in text for each in "\x1b\x07\x9b")
        assert sum("\\x1b[2J" in line for line in text.splitlines()) == 4
        assert "\nnext line\n" in text


def test_every_command_prints_by_such_a_console() -> None:
    sources = Path(relaygr.console.__file__).parent.rglob("*.py")
    own = [path.name for path in sources if re.search(r"\bConsole\(", path.read_text(encoding="utf-8"))]
    assert not own


def test_lag_keeps_the_names_of_others_on_their_line() -> None:
    owner = GroupMember("m", f"c{CLEARS}", "/host", f"worker{CLEARS}\nnext", frozenset())
    found = report(replace(row(3, 17), owner=owner, topic=f"topic\n{CLEARS}"))
    found = replace(found, groups=(replace(found.groups[0], group=f"group{CLEARS}", problems=(f"odd\r{CLEARS}",)),))
    lines = shown(found, 400)
    assert len(lines) == len(shown(report(row(3, 17)), 400)) + 1, "that of the problem"
    assert not any(each in line for line in lines for each in "\x1b\x07\x9b\r")


@pytest.mark.parametrize(("lines", "is_paged"), [(10, False), (100, True)])
def test_what_is_longer_than_the_terminal_goes_through_the_pager(
    monkeypatch: pytest.MonkeyPatch, lines: int, is_paged: bool
) -> None:
    paged: list[str] = []
    monkeypatch.setattr("pydoc.pager", paged.append)
    console = terminal()
    page(console, "\n".join("a line" for _ in range(lines)))
    assert bool(paged) == is_paged
    assert isinstance(console.file, io.StringIO)
    assert (paged[0] if is_paged else console.file.getvalue()).count("a line") == lines


@pytest.mark.parametrize(
    ("status", "split", "code"),
    [(LagStatus.JUDGING, (), 4), (LagStatus.JUDGING, (3,), 2), (LagStatus.UNKNOWN, (3,), 3), (LagStatus.OK, (), 0)],
)
def test_the_exit_code_is_that_of_the_gravest_finding(status: LagStatus, split: tuple[int, ...], code: int) -> None:
    assert exit_code(report(row(0, 1), status=status, split=split)) == code


def test_the_table_of_a_calibration_stays_whole_at_80_columns() -> None:
    points = tuple(RankPoint(n, m, 9_876_543.0 + n) for n in (64, 8_192) for m in (16, 512))
    machine = MachineDescription(
        "m", "cpu", "AMD EPYC", "here", 1, "2.13.0", KvDtype.FLOAT32, 64, ComputeDtype.FLOAT32, "plain torch"
    )
    coefficients = LatencyCoefficients(1e3, 1.0, 1e-3, 1e3, 1.0, 1e-3, 1e3, 1.0, 1e-3, 30, 1e-4, 0.5, 0.5)
    console = Console(file=io.StringIO(), width=WIDTH, highlight=False)
    calibrate._print(console, Calibration(machine, "now", coefficients, points, (), points, ()))
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert sum(bool(re.match(r" *(64|8,192) +(16|512) .* 1\.0 ", line)) for line in lines) == 4, "\n".join(lines)
    assert "T_reload = 30 + 0.0001 bytes" in console.file.getvalue()


def test_the_tables_of_a_bench_stay_whole_at_80_columns() -> None:
    figures = [
        VisitTimes(count, count, 1_234_567.0, 45_678.0, 34_567.0, 2_345.0, 268_435_456, 67_108_864)
        for count in (128, 131_072)
    ]
    found = [break_even(each, 80 << 30, 900 << 30, None, grows=True) for each in figures]
    console = Console(file=io.StringIO(), width=WIDTH, highlight=False)
    model_bench._print_times(console, found)
    model_bench._print_break_even(console, found, grows=True)
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert max(len(line.rstrip()) for line in lines) <= WIDTH
    assert sum(line.lstrip().startswith("131,072 ") for line in lines) == 3, "\n".join(lines)


def test_colours_in_a_pipe_break_no_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Servers of continuous integration set it."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    stdout_console().print("a figure " * 30)
    assert len(capsys.readouterr().out.splitlines()) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "environment", [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}]
)
def test_a_terminal_of_ascii_gets_escapes_and_no_traceback(tmp_path: Path, environment: dict[str, str]) -> None:
    log = tmp_path / "jan.csv"
    log.write_text("user_id,item_id,timestamp\nzoé,kött,1600000000\nzoé,kött,ärlig\n", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "relaygr", "publish", "history", "--interactions", str(log), "--dry-run"],
        env={key: value for key, value in os.environ.items() if key not in ("LC_ALL", "PYTHONUTF8")} | environment,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    assert rb"line 3: timestamp is '\xe4rlig'" in done.stdout


# JSON


def as_json(*arguments: str) -> Any:
    done = CliRunner().invoke(app, [*arguments, "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_settings_print_json_with_numbers_and_truths() -> None:
    found = as_json("settings", "--set", "worker.hbm_bytes=2GiB")
    assert found["worker.hbm_bytes"] == {"value": 2 << 30, "origin": found["worker.hbm_bytes"]["origin"]}
    assert found["bootstrap"]["value"] == SETTINGS.bootstrap
    assert found["worker.reuse_prefixes"]["value"] is True


@pytest.mark.slow
def test_a_model_is_shown_and_measured_in_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Whatever else the machine does.
    monkeypatch.setattr("relaygr.worker.calibration.FIT_ERROR_BOUND", math.inf)
    folder = str(tmp_path / "model")
    small = ["--layers", "1", "--dim", "16", "--heads", "2", "--vocabulary", "50", "--max-prefix", "256"]
    assert CliRunner().invoke(app, ["model", "init", folder, *small]).exit_code == 0
    shown = as_json("model", "show", folder)
    assert shown["config"]["num_layers"] == 1 and shown["kv_bytes_per_token"]["float32"] == 2 * 16 * 4
    assert shown["prefixes"]["grows"] is True
    assert as_json("model", "verify", folder)["changed"] == []
    file = tmp_path / "calibration.json"
    file.write_text(json.dumps(as_json("calibrate", "--model", folder, "--budget-s", "0.1")), encoding="utf-8")
    assert load_calibration(file).machine.model_revision == shown["revision"]


_BIAS = "relative_bias.time_buckets"


@pytest.mark.parametrize(
    ("preset", "grows", "valid"),
    [
        ("dlrm-v3", "never grow (because of position_origin)", "for one query time (because of time_encoding)"),
        ("research", f"never grow (because of {_BIAS})", f"for one query time (because of {_BIAS})"),
        ("nvidia", "may grow", "at any time"),
    ],
)
def test_a_model_says_because_of_which_option_its_prefixes_serve_no_later_request(
    tmp_path: Path, preset: str, grows: str, valid: str
) -> None:
    said = f"{grows}, computed in any chunks, valid {valid}"
    small = ["--layers", "1", "--dim", "16", "--heads", "2", "--vocabulary", "50", "--max-prefix", "256"]
    made = CliRunner().invoke(app, ["model", "init", str(tmp_path), "--preset", preset, *small])
    assert made.exit_code == 0, made.output
    shown = CliRunner().invoke(app, ["model", "show", str(tmp_path)])
    assert said in " ".join(shown.output.split())
    restricted = as_json("model", "show", str(tmp_path))["restricted_by"]
    assert all((f"because of {' and '.join(options)})" in said) == bool(options) for options in restricted.values())


def test_a_name_that_looks_like_markup_or_an_emoji_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table("name")
    table.add_row("[red]x[/red]:abc:")
    stdout_console().print(table)
    assert "[red]x[/red]:abc:" in capsys.readouterr().out
