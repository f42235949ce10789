"""`relaygr vectors FILE.npz`: checks our layers against values that other implementations computed.

The command imports torch only when it runs, so that `--help` answers without it.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from relaygr.cli.options import JsonOption
from relaygr.cli.texts import print_json, stdout_console

if TYPE_CHECKING:
    from relaygr.worker.model.vectors import CaseResult

EXIT_FAILED = 1
EXIT_NOT_UNDERSTOOD = 2


def vectors(
    file: Annotated[Path, typer.Argument(help="File of test vectors (.npz); docs/model.md describes its format.")],
    as_json: JsonOption = False,
) -> None:
    """Check our layers against a file of test vectors."""
    from relaygr.worker.model.vectors import KINDS, check_case, read_vectors

    results = [check_case(case, KINDS) for case in read_vectors(file)]
    if as_json:
        print_json([asdict(result) for result in results])
    else:
        _print(results)
    raise typer.Exit(exit_code(results))


def exit_code(results: list[CaseResult]) -> int:
    """0 if every case passed, 1 if one failed, 2 if none failed but one is of an unknown kind."""
    from relaygr.worker.model.vectors import CaseVerdict

    verdicts = {result.verdict for result in results}
    if CaseVerdict.FAILED in verdicts:
        return EXIT_FAILED
    return EXIT_NOT_UNDERSTOOD if CaseVerdict.NOT_UNDERSTOOD in verdicts else 0


def _print(results: list[CaseResult]) -> None:
    from relaygr.worker.model.vectors import TOLERANCE, CaseVerdict

    styles = {CaseVerdict.PASSED: "green", CaseVerdict.FAILED: "red", CaseVerdict.NOT_UNDERSTOOD: "yellow"}
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("case")
    table.add_column("verdict")
    table.add_column("worst error", justify="right")
    table.add_column("of")
    for result in results:
        known = result.verdict is not CaseVerdict.NOT_UNDERSTOOD
        table.add_row(
            Text(result.name),
            Text(result.verdict, styles[result.verdict]),
            f"{result.worst_error:.1e}" if known else "",
            Text(result.detail or result.worst_array),
        )
    # Each case is one line, however long it is; only the terminal may wrap it.
    console = stdout_console()
    console.print(table)
    passed = sum(result.verdict is CaseVerdict.PASSED for result in results)
    console.print(f"{passed} of {len(results)} passed; allowed is {TOLERANCE:.0e} of the largest value")
