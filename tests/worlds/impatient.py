"""A command of relaygr that waits less than a user's.

`python -m tests.worlds.impatient relaygr.kafka.session.ASK_S=1 worker --config ...` runs `relaygr worker` with
another value of one constant.
"""

from __future__ import annotations

import importlib
import sys


def main() -> None:
    """Sets the constant and runs the command."""
    name, _, value = sys.argv.pop(1).partition("=")
    module, _, constant = name.rpartition(".")
    place = importlib.import_module(module)
    assert type(getattr(place, constant)) is float
    setattr(place, constant, float(value))
    from relaygr.cli.__main__ import main as run_command

    run_command()


if __name__ == "__main__":
    main()
