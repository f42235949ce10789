"""`relaygr vectors FILE.npz`: our layers against values that other people's code computed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from relaygr.worker.model.vectors import KINDS, TOLERANCE, CaseResult, CaseVerdict, check_case, read_vectors

EXIT_FAILED = 1
EXIT_NOT_UNDERSTOOD = 2

_LINE_WIDTH = 1000
_STYLES = {CaseVerdict.PASSED: "green", CaseVerdict.FAILED: "red", CaseVerdict.NOT_UNDERSTOOD: "yellow"}


def vectors(
    file: Annotated[Path, typer.Argument(help="Test vectors (.npz); docs/model.md says their form.")],
) -> None:
    """Check our layer against a file of test vectors."""
    results = [check_case(case, KINDS) for case in read_vectors(file)]
    _print(results)
    raise typer.Exit(exit_code(results))


def exit_code(results: list[CaseResult]) -> int:
    """0 if every case passed, 1 if one failed, 2 if none failed but one was not understood."""
    verdicts = {result.verdict for result in results}
    if CaseVerdict.FAILED in verdicts:
        return EXIT_FAILED
    return EXIT_NOT_UNDERSTOOD if CaseVerdict.NOT_UNDERSTOOD in verdicts else 0


def _print(results: list[CaseResult]) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("case")
    table.add_column("verdict")
    table.add_column("worst error", justify="right")
    table.add_column("of")
    for result in results:
        known = result.verdict is not CaseVerdict.NOT_UNDERSTOOD
        table.add_row(
            Text(result.name),
            Text(result.verdict, _STYLES[result.verdict]),
            f"{result.worst_error:.1e}" if known else "",
            Text(result.detail or result.worst_array),
        )
    # One line a case, however long: the terminal may wrap it, we do not.
    console = Console(highlight=False, width=_LINE_WIDTH)
    console.print(table)
    passed = sum(result.verdict is CaseVerdict.PASSED for result in results)
    console.print(f"{passed} of {len(results)} passed; allowed is {TOLERANCE:.0e} of the largest value")
