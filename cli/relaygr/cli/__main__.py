"""Entry point of `relaygr` and `python -m relaygr`."""

from __future__ import annotations

import sys


def main() -> None:
    """Runs the command line. If typer or rich is missing, prints the extra that installs it."""
    try:
        from relaygr.cli.app import app
    except KeyboardInterrupt:
        sys.exit(130)
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.exit(f"{error.name} is not installed: pip install 'relaygr[cli]'.")
    app()


if __name__ == "__main__":
    main()
