"""`relaygr cache show`: looks at the cache of a running worker on this machine.

The command asks the worker over the socket in its private folder, so it runs as the worker's user, or as root.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Final, TypeVar

import typer
from rich.table import Table
from rich.text import Text

from relaygr.cli.options import ConfigOption, JsonOption, SetOption, command_settings
from relaygr.cli.texts import printable, show_age, show_size, stdout_console
from relaygr.runtime.errors import RelayError
from relaygr.settings import Settings
from relaygr.worker.admin_socket import SOCKET_NAME, ask
from relaygr.worker.cache.admin import (
    MOST_USERS,
    CacheReport,
    Report,
    Request,
    Show,
    ShowUser,
    TierReport,
    UserReport,
    decode_report,
    encode_request,
)
from relaygr.worker.shared.lock import worker_folder

app = typer.Typer(no_args_is_help=True, add_completion=False)

R = TypeVar("R", bound=Report)

_TIMEOUT_S: Final = 60.0
_PIPE_WIDTH: Final = 120

WorkerArgument = Annotated[str, typer.Argument(metavar="WORKER_ID", help="The worker.worker_id of a running worker.")]
SocketOption = Annotated[
    Path | None,
    typer.Option(
        "--socket", metavar="PATH", help="The worker's socket.", show_default="in worker.shared_path/GROUP/WORKER_ID"
    ),
]


@app.callback()
def cache() -> None:
    """Look at a running worker's cache."""


@app.command()
def show(
    worker_id: WorkerArgument,
    user: Annotated[
        str | None, typer.Option(metavar="ID", help="The entries of this user.", show_default=False)
    ] = None,
    top: Annotated[int, typer.Option(min=0, max=MOST_USERS, help="How many users to list, by bytes.")] = 10,
    as_json: JsonOption = False,
    socket: SocketOption = None,
    config: ConfigOption = None,
    overrides: SetOption = None,
) -> None:
    """Show what the cache of a running worker holds.

    Bytes by state: evictable prefixes make room for others; leased ones wait for their request, pinned ones are being
    read, and those in flight are being computed or copied. Found: look-ups for ranking that found K,V in this tier,
    since the start.
    """
    worker = _Worker(worker_id, socket, config, overrides)
    if user is not None:
        found = worker.ask(UserReport, _of_user(user))
        _print(found, as_json, lambda: _show_entries(found))
    else:
        report = worker.ask(CacheReport, Show(users=top))
        _print(report, as_json, lambda: _show_cache(report))


def _of_user(user_id: str) -> ShowUser:
    try:
        return ShowUser(user_id=user_id)
    except ValueError:
        raise RelayError("--user is not the id of a user: give the key of the user's messages.") from None


class _Worker:
    """A worker on this machine."""

    def __init__(self, worker_id: str, socket: Path | None, config: Path | None, overrides: list[str] | None) -> None:
        self._worker_id = worker_id
        self._path = socket if socket is not None else _socket_of(worker_id, command_settings(config, None, overrides))

    def ask(self, kind: type[R], request: Request) -> R:
        """Raises RelayError if the worker cannot be reached or refuses the request."""
        name, path = self._worker_id, self._path
        try:
            return decode_report(kind, ask(path, encode_request(request), _TIMEOUT_S))
        except (FileNotFoundError, NotADirectoryError):
            raise RelayError(
                f"No worker {name} runs here: there is no socket at {path}. {_others(path)}Start it, run "
                "this command as its user, or pass its settings (--config, --set worker.shared_path=...) or --socket."
            ) from None
        except ConnectionRefusedError:
            raise RelayError(f"{name} does not run: its process has died and left {path}. Start it.") from None
        except PermissionError:
            raise RelayError(
                f"This user may not open {path}: run the command as the user of the worker, or as root."
            ) from None
        except (TimeoutError, BlockingIOError):
            raise RelayError(f"{name} did not answer within {_TIMEOUT_S:g} s: look at its /healthz.") from None
        except OSError as error:
            raise RelayError(f"{path} cannot be used ({error.strerror}): is it the socket of a worker?") from error


def _socket_of(worker_id: str, settings: Settings) -> Path:
    base, own = worker_folder(settings.worker.shared_path, settings.workers_group, worker_id)
    return base.joinpath(*own, SOCKET_NAME)


def _others(path: Path) -> str:
    """The workers beside this one, for a message."""
    try:
        names = sorted(each.parent.name for each in path.parent.parent.glob(f"*/{SOCKET_NAME}"))
    except OSError:
        names = []
    return f"There are sockets of {', '.join(map(printable, names[:10]))}. " if names else ""


# -- output --------------------------------------------------------------------------------------------


def _print(report: Report, as_json: bool, show_it: Callable[[], None]) -> None:
    if as_json:
        typer.echo(json.dumps(asdict(report), indent=2))
    else:
        show_it()


def _table(*columns: str, left: int = 1, gap: int = 2) -> Table:
    """The first `left` columns are texts, the others numbers. `gap`: spaces between two columns."""
    table = Table(box=None, padding=(0, gap, 0, 0), header_style="bold")
    for number, name in enumerate(columns):
        if number < left:
            table.add_column(name, overflow="fold")
        else:
            table.add_column(name, justify="right", no_wrap=True)
    return table


def _show_cache(report: CacheReport) -> None:
    console = stdout_console(_PIPE_WIDTH)
    console.print(
        f"{report.worker_id}: model {printable(report.model_revision[:12])}, {_count(report.users, 'user', 'users')}, "
        f"{_count(report.leases, 'lease', 'leases')}, {_count(report.look_ups, 'look-up', 'look-ups')}",
        soft_wrap=True,
    )
    tiers = [each for each in report.tiers if each.pages.capacity]
    table = _table("", *(f"{each.tier.value}{unit}" for each in tiers for unit in ("", " pages")))
    for state in ("evictable", "leased", "pinned", "in_flight", "free", "capacity"):
        table.add_row(state.replace("_", " "), *(cell for each in tiers for cell in _size_cells(each, state)))
    table.add_row("entries", *(cell for each in tiers for cell in (f"{each.pages.entries:,}", "")))
    found = ("-" if each.found is None else f"{each.found:.1%}" for each in tiers)
    table.add_row("found", *(cell for share in found for cell in (share, "")))
    console.print(table)
    if report.top:
        console.print()
        users = _table("user", *(each.tier.value for each in tiers), "entries", "age", "last use")
        for share in report.top:
            sizes = {"hbm": share.hbm_bytes, "dram": share.dram_bytes}
            users.add_row(
                Text(printable(share.user_id)),
                *(show_size(sizes[each.tier.value]) for each in tiers),
                str(share.entries),
                show_age(share.age_s),
                show_age(share.idle_s),
            )
        console.print(users)
        if report.users > len(report.top):
            console.print(f"and {report.users - len(report.top):,} users with less: --top shows more", style="dim")


def _size_cells(tier: TierReport, state: str) -> tuple[str, str]:
    pages = getattr(tier.pages, state)
    return show_size(pages * tier.page_bytes), f"{pages:,}"


def _show_entries(report: UserReport) -> None:
    console = stdout_console(_PIPE_WIDTH)
    if not report.entries:
        console.print(f"{report.worker_id} has no prefix of {printable(report.user_id)}.", soft_wrap=True)
        return
    columns = ("tier", "state", "model", "tokens", "pages", "size", "leases", "pins", "age", "last use")
    # Fits into 80 columns.
    table = _table(*columns, left=3, gap=1)
    for entry in report.entries:
        table.add_row(
            entry.tier.value,
            entry.state.value,
            "other" if entry.model_revision is None else printable(entry.model_revision[:8]),
            f"{entry.tokens:,}",
            f"{entry.pages:,}" + (f"+{entry.coming_pages:,}" if entry.coming_pages else ""),
            show_size(entry.size_bytes),
            str(entry.leases),
            str(entry.pins),
            show_age(entry.age_s),
            show_age(entry.idle_s),
        )
    console.print(table)


def _count(count: int, one: str, many: str) -> str:
    return f"{count:,} {one if count == 1 else many}"
