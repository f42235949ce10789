"""Runs groups of phases, then prints one table and writes build/gpu/results/figures.json. `run.sh` calls it.

A phase is a command in a process of its own, with a time limit: tests, a benchmark or the demo. A phase that fails or
exceeds its limit does not stop the next ones; its figures up to then count. The exit code is 1 if one did.

`--dry` runs the smallest case of every phase on a CPU: the kernels on Triton's interpreter, the relay in plain torch.
"""

from __future__ import annotations

import contextlib
import csv
import enum
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch
from rich.console import Console
from rich.table import Table

from relaygr.worker.device import open_device

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "build" / "gpu" / "results"
DRY_LIMIT_S = 300.0
"""Of each phase, which takes less than a minute unless the machine does other work."""
STOP_S = 20.0
"""How long a phase that exceeded its limit has to end its own processes."""
Row = Mapping[str, Any]
console = Console(highlight=False, width=140)


class Outcome(enum.StrEnum):
    """How a phase ended."""

    PASSED = "passed"
    FAILED = "failed"
    TOO_LONG = "too long"


@dataclass(frozen=True, slots=True)
class Figures:
    """The file of figures that a phase writes."""

    suffix: str
    rows: Callable[[str], list[Row]]
    """From the text of the file."""
    text: Callable[[Row], str]
    """A row for the table; empty: only the JSON has it."""


@dataclass(frozen=True, slots=True)
class Phase:
    """A command of this Python. In its arguments, OUT is the file of its figures."""

    name: str
    limit_s: float
    arguments: str
    figures: Figures


@dataclass(frozen=True, slots=True)
class Result:
    """A phase that ended."""

    name: str
    outcome: Outcome
    seconds: float
    rows: list[Row]


# -- figures ----------------------------------------------------------------------------------------


def _counts(text: str) -> list[Row]:
    suite = ElementTree.fromstring(text)[0].attrib
    failed = int(suite["failures"]) + int(suite["errors"])
    skipped = int(suite["skipped"])
    return [{"passed": int(suite["tests"]) - failed - skipped, "failed": failed, "skipped": skipped}]


def _attention_text(row: Row) -> str:
    work = f"{row['candidates']} candidates" if row["candidates"] else "pre-infer"
    work += f" beside a chunk of {row['beside_rows']:,}" if row["beside_rows"] else ""
    return (
        f"{row['users']} x {row['prefix_tokens']:,} tokens, {work}, {row['back_end']}: {row['median_us']:,.0f} µs, "
        f"{row['share_of_peak']:.0%} of the product's rate, {row['share_of_roofline']:.0%} of the roofline, "
        f"error {row['error']:.0e}"
    )


def _engine_text(row: Row) -> str:
    if row["stage"] == "rested_hit":
        return ""
    new = f" + {int(row['new_tokens']):,}" if row["stage"] == "append" else ""
    return (
        f"{row['shape']}, {row['backend']}: {row['stage']} of {row['requests']} x "
        f"{int(row['prefix_tokens']):,}{new} tokens: {float(row['median_us']) / 1e3:,.2f} ms"
    )


def _relay_text(row: Row) -> str:
    return (
        f"{row['system']}, {row['rate_per_s']:.1f}/s within {row['deadline_ms']} ms: {row['late_share']:.1%} of "
        f"{row['offered']} late, P50 {row['p50_ms']:.1f} ms, P99 {row['p99_ms']:.1f} ms, device idle "
        f"{row['device_idle_share']:.0%}, score error {row['worst_score_error']:.0e}"
    )


TESTS = Figures("xml", _counts, lambda row: ", ".join(f"{count} {name}" for name, count in row.items()))
ATTENTION = Figures("json", json.loads, _attention_text)
ENGINE = Figures("csv", lambda text: list(csv.DictReader(text.splitlines())), _engine_text)
RELAY = Figures("json", json.loads, _relay_text)

# -- phases -----------------------------------------------------------------------------------------

KERNEL_TESTS = tuple(f"tests/workers/test_{name}.py" for name in ("triton_attention", "fused_output", "graphs"))
CONTRACT = "tests/workers/test_engine_contract.py"


def on_gpu() -> dict[str, list[Phase]]:
    """The phases by group. Tests use a GPU where there is one. All limits together are ten minutes, for hosts that are
    lent for a quarter of an hour.
    """
    processes = f"-n {min(12, os.cpu_count() or 1)} --dist load"
    attention = "-m relaygr.bench.engine.attention --json OUT --device cuda"
    engine = "-m relaygr.bench.engine --out OUT --device cuda"
    sizes = "--prefixes 2048,8192 --candidates 128 --appends 64 --batches 16 --rounds 3"
    return {
        "right": [
            _tests("kernels", 75, f"{' '.join(KERNEL_TESTS)} {processes}"),
            _tests("contract", 75, f"{CONTRACT} -k triton {processes}"),
        ],
        "kernel": [
            # The first one also compiles and tunes.
            Phase("pre-infer", 100, f"{attention} --users 1 --prefixes 2048,8192 --candidates 0", ATTENTION),
            Phase("hits", 60, f"{attention} --users 1,16,64 --prefixes 8192 --candidates 128", ATTENTION),
            Phase("split", 30, f"{attention} --users 1 --prefixes 16384 --candidates 128 --beside 2048", ATTENTION),
        ],
        "engine": [_engine(shape, 80, f"{engine} --shapes {shape} {sizes}") for shape in ("dlrm-v3", "nvidia")],
        "relay": [Phase("relay", 120, "-m benchmarks.gpu.relay OUT", RELAY)],
    }


def dry() -> list[Phase]:
    """The smallest case of every phase."""
    tests = (
        f"{KERNEL_TESTS[0]}::test_types_of_the_compute_and_of_the_pages",
        f"{KERNEL_TESTS[1]}::test_the_fused_norm_is_the_plain_one_narrowed",
        f"{KERNEL_TESTS[2]}::test_a_size_seen_twice_runs_from_its_graph_and_gives_the_same_rows",
    )
    attention = "-m tests.worlds.interpreted relaygr.bench.engine.attention --json OUT"
    engine = "-m tests.worlds.interpreted relaygr.bench.engine --out OUT"
    return [
        _tests("kernels", DRY_LIMIT_S, " ".join(tests)),
        _tests("contract", DRY_LIMIT_S, f"{CONTRACT}::test_an_appended_prefix_is_the_longer_prefix -k triton"),
        Phase(
            "attention",
            DRY_LIMIT_S,
            f"{attention} --users 1,2 --prefixes 64 --candidates 0,4 --heads 1 --dim 16",
            ATTENTION,
        ),
        _engine(
            "engine",
            DRY_LIMIT_S,
            f"{engine} --shapes tiny --prefixes 16 --candidates 2 --appends 2 --batches 2 --rounds 1",
        ),
        Phase("relay", DRY_LIMIT_S, "-m benchmarks.gpu.relay OUT --dry", RELAY),
    ]


def _tests(name: str, limit_s: float, chosen: str) -> Phase:
    return Phase(name, limit_s, f"-m pytest -q --junitxml OUT {chosen}", TESTS)


def _engine(name: str, limit_s: float, command: str) -> Phase:
    return Phase(name, limit_s, f"{command} --dtypes bfloat16 --graphs --plots build/gpu/results", ENGINE)


# -- running ----------------------------------------------------------------------------------------


def run(phases: Sequence[Phase], results: Path, environment: Mapping[str, str]) -> list[Result]:
    """Runs the phases one after the other, whatever becomes of each."""
    results.mkdir(parents=True, exist_ok=True)
    return [_run(phase, results / f"{phase.name}.{phase.figures.suffix}", environment) for phase in phases]


def _run(phase: Phase, out: Path, environment: Mapping[str, str]) -> Result:
    out.unlink(missing_ok=True)
    console.rule(phase.name)
    command = [sys.executable, *(str(out) if argument == "OUT" else argument for argument in phase.arguments.split())]
    begun_s = time.monotonic()
    process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, **environment}, start_new_session=True)
    try:
        outcome = Outcome.FAILED if process.wait(phase.limit_s) else Outcome.PASSED
    except subprocess.TimeoutExpired:
        outcome = Outcome.TOO_LONG
    finally:
        _end(process)
    seconds = time.monotonic() - begun_s
    try:
        rows = phase.figures.rows(out.read_text(encoding="utf-8"))
    except (OSError, ValueError, LookupError, ElementTree.ParseError) as error:
        console.print(f"{phase.name}: no figures ({error!r})")
        rows = []
    return Result(phase.name, outcome, seconds, rows)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends the phase, and what it left running."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def report(results: Sequence[Result], phases: Sequence[Phase], device: str, out: Path) -> None:
    """Prints the table, and writes everything as JSON."""
    table = Table(title=device, title_justify="left", show_header=False)
    for result, phase in zip(results, phases, strict=True):
        table.add_section()
        table.add_row(result.name, f"{result.outcome} after {result.seconds:.0f} s")
        for text in filter(None, map(phase.figures.text, result.rows)):
            table.add_row("", text)
    console.print(table)
    plain = [
        {"phase": each.name, "outcome": each.outcome, "seconds": round(each.seconds, 1), "figures": each.rows}
        for each in results
    ]
    out.write_text(json.dumps({"device": device, "phases": plain}, indent=1) + "\n", encoding="utf-8")
    console.print(f"written to {out}")


def main(arguments: Sequence[str]) -> int:
    groups = on_gpu()
    if list(arguments) == ["--dry"]:
        phases, environment, device = dry(), {"CUDA_VISIBLE_DEVICES": ""}, "dry run on a CPU"
    elif arguments and set(arguments) <= set(groups):
        opened = open_device()
        if opened.is_cpu:
            console.print("torch finds no GPU here; --dry runs on a CPU")
            return 2
        phases = [phase for name in arguments for phase in groups[name]]
        environment, device = {}, opened.description
    else:
        console.print(f"name one or more of {', '.join(groups)}, or --dry alone")
        return 2
    device += f", torch {torch.__version__}, Triton {version('triton')}"
    results = run(phases, RESULTS, environment)
    report(results, phases, device, RESULTS / "figures.json")
    return int(any(result.outcome is not Outcome.PASSED for result in results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
