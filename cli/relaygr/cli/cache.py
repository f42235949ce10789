"""`relaygr cache`: looks at the cache of a running worker, and changes it."""

from __future__ import annotations

import typer

from relaygr.cli.cache_admin import drop, limit, show

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Look at a running worker's cache, and change it.")
for command in (show, drop, limit):
    app.command()(command)
