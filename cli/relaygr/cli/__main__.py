"""Entry point of `relaygr` and `python -m relaygr`."""

from __future__ import annotations

import sys

from relaygr.runtime.standard_streams import open_closed_streams
from relaygr.runtime.stop_signals import exit_on_sigterm_if_first


def main() -> None:
    """Runs the command line. If typer or rich is missing, prints the extra that installs it."""
    open_closed_streams()
    exit_on_sigterm_if_first()
    try:
        from relaygr.cli.app import app, print_any_character
    except KeyboardInterrupt:
        sys.exit(130)
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.exit(f"{error.name} is not installed: pip install 'relaygr[cli]'.")
    print_any_character()
    app()


if __name__ == "__main__":
    main()
