"""Checks the vectors of another implementation; `relaygr.schemas.vectors` describes them."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from relaygr.schemas.vectors import differences, wire_file


def main(arguments: list[str] | None = None) -> int:
    """The exit code: 0, or 1 if something differs, 2 if the file cannot be read."""
    parser = argparse.ArgumentParser("python -m relaygr.schemas.vectors", description="Test vectors of the wire form.")
    parser.add_argument("--against", metavar="FILE", required=True, help="check this file of another implementation")
    file = parser.parse_args(arguments).against
    try:
        theirs = json.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        sys.stderr.write(f"{file} cannot be read: {error}\n")
        return 2
    found = list(differences(theirs, wire_file()))
    for line in found:
        sys.stdout.write(f"{line}\n")
    if not found:
        counts = ", ".join(f"{len(value)} {name}" for name, value in theirs.items() if isinstance(value, list))
        sys.stdout.write(f"{file} agrees: {counts}\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
