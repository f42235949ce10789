"""`relaygr cache show|drop|limit`: looks at the cache of a running worker on this machine, and changes it.

The commands ask the worker over the socket in its private folder, so they run as the worker's user, or as root.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

import typer
from rich.table import Table
from rich.text import Text

from relaygr.cli.options import ConfigOption, JsonOption, SetOption, command_settings
from relaygr.cli.texts import parse_size, printable, show_age, show_size, stdout_console
from relaygr.runtime.errors import RelayError
from relaygr.settings import Settings
from relaygr.worker.admin_socket import SOCKET_NAME, ask
from relaygr.worker.cache.admin import (
    MOST_USERS,
    CacheReport,
    DropAll,
    DropReport,
    DropUser,
    Limit,
    LimitReport,
    Report,
    Request,
    Show,
    ShowUser,
    TierLimit,
    TierReport,
    UserReport,
    decode_report,
    encode_request,
)
from relaygr.worker.shared.lock import worker_folder

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Look at a running worker's cache, and change it.")

R = TypeVar("R", bound=Report)
U = TypeVar("U", ShowUser, DropUser)

_TIMEOUT_S: Final = 60.0
"""Dropping hundreds of thousands of prefixes beside full load takes seconds."""
_NONE: Final = "none"
_PIPE_WIDTH: Final = 120

WorkerArgument = Annotated[str, typer.Argument(metavar="WORKER_ID", help="The worker.worker_id of a running worker.")]
SocketOption = Annotated[
    Path | None,
    typer.Option(
        "--socket", metavar="PATH", help="The worker's socket.", show_default="in worker.shared_path/GROUP/WORKER_ID"
    ),
]


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
    read, those in flight are being computed or copied; a limit withholds the rest. Found: look-ups for ranking that
    found K,V in this tier, since the start.
    """
    worker = _Worker(worker_id, socket, config, overrides)
    if user is not None:
        found = worker.ask(UserReport, _of_user(ShowUser, user))
        _print(found, as_json, lambda: _show_entries(found))
    else:
        report = worker.ask(CacheReport, Show(users=top))
        _print(report, as_json, lambda: _show_cache(report))


@app.command()
def drop(
    worker_id: WorkerArgument,
    user: Annotated[str | None, typer.Option(metavar="ID", help="Drop this user.", show_default=False)] = None,
    everything: Annotated[bool, typer.Option("--all", help="Drop all users.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="With --all: do not ask.")] = False,
    as_json: JsonOption = False,
    socket: SocketOption = None,
    config: ConfigOption = None,
    overrides: SetOption = None,
) -> None:
    """Drop prefixes of a running worker from both tiers, and zero their pages.

    Histories stay, so the next request or job of a user computes the prefix again. To delete a user everywhere, publish
    a tombstone.
    """
    if everything == (user is not None):
        raise RelayError("Give one of --user ID and --all.")
    worker = _Worker(worker_id, socket, config, overrides)
    request: Request = DropAll()
    if user is not None:
        request = _of_user(DropUser, user)
    elif not yes:
        report = worker.ask(CacheReport, Show(users=0))
        entries = sum(each.pages.entries for each in report.tiers)
        question = f"Drop all {entries:,} prefixes of {report.users:,} users from {worker_id}?"
        if not typer.confirm(question, err=True):
            raise typer.Exit(1)
    dropped = worker.ask(DropReport, request)
    _print(dropped, as_json, lambda: _show_dropped(dropped))


@app.command()
def limit(
    worker_id: WorkerArgument,
    hbm: Annotated[
        str | None, typer.Option(metavar="SIZE|none", help="Most bytes of the HBM tier.", show_default=False)
    ] = None,
    dram: Annotated[
        str | None, typer.Option(metavar="SIZE|none", help="Most bytes of the DRAM tier.", show_default=False)
    ] = None,
    as_json: JsonOption = False,
    socket: SocketOption = None,
    config: ConfigOption = None,
    overrides: SetOption = None,
) -> None:
    """Limit the bytes of a running worker's tiers that are in use, within those taken at its start.

    The prefixes that the policy would evict next make room at once; those that are leased, pinned or in flight go when
    they are released. The memory stays taken. The limit ends with the process; `none` lifts it earlier.
    """
    given = {"hbm": hbm, "dram": dram}
    tiers: Any = {name: _limit(name, text) for name, text in given.items() if text is not None}
    if not tiers:
        raise RelayError("Give --hbm SIZE, --dram SIZE or both; none instead of a size lifts the limit.")
    report = _Worker(worker_id, socket, config, overrides).ask(LimitReport, Limit(tiers=tiers))
    _print(report, as_json, lambda: _show_limits(report))


def _limit(name: str, text: str) -> int | None:
    return None if text.lower() == _NONE else parse_size(f"--{name}", text)


def _of_user(kind: type[U], user_id: str) -> U:
    try:
        return kind(user_id=user_id)
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
            raise RelayError(
                f"{name} did not answer within {_TIMEOUT_S:g} s, but may still carry out the request: look at its "
                "/healthz."
            ) from None
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
    for state in ("evictable", "leased", "pinned", "in_flight", "free", "withheld", "capacity"):
        table.add_row(state.replace("_", " "), *(cell for each in tiers for cell in _size_cells(each, state)))
    limits = (_size_cells(each, "limit") if each.pages.limit < each.pages.capacity else (_NONE, "") for each in tiers)
    table.add_row("limit", *(cell for cells in limits for cell in cells))
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


def _show_dropped(report: DropReport) -> None:
    console = stdout_console(_PIPE_WIDTH)
    console.print(
        f"{report.worker_id}: dropped {_count(report.entries, 'prefix', 'prefixes')} of "
        f"{_count(report.users, 'user', 'users')}: {show_size(report.hbm_bytes)} in hbm, "
        f"{show_size(report.dram_bytes)} in dram.",
        soft_wrap=True,
    )
    if report.held_entries:
        console.print(
            f"{_count(report.held_entries, 'of them is', 'of them are')} read, filled or copied at the moment: these "
            f"{show_size(report.held_bytes)} become free when that has ended. No look-up finds them.",
            soft_wrap=True,
        )
    if report.leases:
        console.print(
            f"Leases that ended: {report.leases:,}. Their requests compute the prefix again.",
            soft_wrap=True,
        )


def _show_limits(report: LimitReport) -> None:
    console = stdout_console(_PIPE_WIDTH)
    for each in report.tiers:
        console.print(f"{report.worker_id}: {_limit_text(each)}", soft_wrap=True)
    if any(each.limit_bytes < each.capacity_bytes for each in report.tiers):
        console.print("The memory stays taken. A limit ends with the process.", style="dim")


def _limit_text(each: TierLimit) -> str:
    tier = each.tier.value
    if each.limit_bytes == each.capacity_bytes:
        return f"{tier} has no limit: all {show_size(each.capacity_bytes)} may be in use."
    text = (
        f"{tier} may use {show_size(each.limit_bytes)} of {show_size(each.capacity_bytes)}; "
        f"{_count(each.evicted, 'prefix', 'prefixes')} evicted."
    )
    if each.excess_bytes:
        text += f" {show_size(each.excess_bytes)} more are leased, pinned or in flight, and go when they are released."
    return text


def _count(count: int, one: str, many: str) -> str:
    return f"{count:,} {one if count == 1 else many}"
