"""The options that every command shares, and the settings that they load.

In the modules of commands, slow imports are inside the command, so that `--help` answers at once.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import GenericAlias, UnionType
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin, get_type_hints

import typer
from annotated_types import Ge, Le

from relaygr.runtime.errors import RelayError
from relaygr.runtime.options import Option

if TYPE_CHECKING:
    from relaygr.settings import Settings


def _setting_keys(incomplete: str) -> list[str]:
    """Completes `--set`."""
    from relaygr.settings import setting_fields

    return [f"{key}=" for key in setting_fields() if key.startswith(incomplete)]


ConfigOption = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="Settings file (YAML).", show_default=False)
]
BootstrapOption = Annotated[
    str | None,
    typer.Option("--bootstrap", metavar="HOST:PORT", help="The Kafka cluster; short for --set bootstrap=HOST:PORT."),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="One setting, such as worker.hbm_bytes=2GiB; may be repeated.",
        autocompletion=_setting_keys,
    ),
]
ColumnsOption = Annotated[
    str | None,
    typer.Option(
        "--columns",
        metavar="ROLE=NAME,...",
        help="What the log calls its columns: user=uid,item=sku,time=ts,action=event. Or rating=stars.",
        show_default=False,
    ),
]
ActionsOption = Annotated[
    str | None,
    typer.Option(
        "--actions",
        metavar="EVENT=CODE,...",
        help="Action codes of the log's event names: view=1,click=2.",
        show_default=False,
    ),
]
TiesOption = Annotated[
    str,
    typer.Option(
        "--ties",
        metavar="hash|file",
        help="The order of a user's behaviours of equal time: by a hash of the row, or as in the file.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def is_given(context: typer.Context, name: str) -> bool:
    """Whether the command line has this option."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def takes(declared: type, after: str | None = None) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command the options that a dataclass or model declares (`relaygr.runtime.options`). They come in its
    parameter `**given`, by the names of the fields; the help shows them behind the option `after`, or last.

    An option is None, if it is not given, for a model, which may have more sources of values; and the default of the
    field for a dataclass. The bounds `Ge` and `Le` are checked here; others, in `Field`, by the model alone.
    """

    def with_options(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        by_name = inspect.Parameter.KEYWORD_ONLY
        own = [
            each.replace(kind=by_name) for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD
        ]
        place = len(own) if after is None else 1 + [each.name for each in own].index(after)
        own[place:place] = _options_of(declared)
        command.__dict__["__signature__"] = signature.replace(parameters=own)
        return command

    return with_options


def _options_of(declared: Any) -> Iterator[inspect.Parameter]:
    """The options as parameters of a command, in the order of the fields."""
    has_values = is_dataclass(declared)
    defaults = {each.name: each.default for each in fields(declared)} if has_values else {}
    for name, hint in get_type_hints(declared, include_extras=True).items():
        option = next((mark for mark in getattr(hint, "__metadata__", ()) if isinstance(mark, Option)), None)
        if option is None:
            continue
        kind, least, most = _read_as(hint)
        default, shown = defaults.get(name), option.shown_default
        if not has_values:
            default_of_model = declared.model_fields[name].default
            kind, shown = kind | None, str(default_of_model) if shown is True and default_of_model else shown
        info = typer.Option(
            option.flag or f"--{name.replace('_', '-')}",
            min=least, max=most, help=option.help, metavar=option.metavar, show_default=shown,
        )  # fmt: skip
        annotation: Any = Annotated[kind, info]
        yield inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _read_as(hint: Any) -> tuple[Any, float | None, float | None]:
    """The type as which typer reads a field, and its bounds. What has no form on the command line is read as a text."""
    kind, *marks = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    if isinstance(kind, UnionType):
        [kind] = (each for each in get_args(kind) if each is not type(None))
    if get_origin(kind) is tuple:
        each, least, most = _read_as(get_args(kind)[0])
        return GenericAlias(list, (each,)), least, most
    if get_origin(kind) is Mapping:
        return list[str], None, None
    bounds: dict[type, Any] = {Ge: None, Le: None}
    bounds |= {type(mark): mark.ge if isinstance(mark, Ge) else mark.le for mark in marks if isinstance(mark, Ge | Le)}
    return kind if issubclass(kind, int | float | str | Path) else str, bounds[Ge], bounds[Le]


def command_settings(
    config: Path | None = None, bootstrap: str | None = None, overrides: list[str] | None = None
) -> Settings:
    """Loads the settings of this command, and configures logging from them. Raises RelayError."""
    from relaygr.runtime.logs import configure_logging
    from relaygr.settings import load_settings

    settings = load_settings(config, bootstrap=bootstrap, overrides=overrides or ())
    configure_logging(settings.log)
    return settings


def require_writable(option: str, path: Path) -> None:
    """Before a long measurement. Raises RelayError if the file cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not path.exists()
        if path.is_fifo():
            return  # A reader that comes and goes with this look would see the end of the pipe.
        path.open("ab").close()
        if is_new:
            path.unlink()
    except OSError as error:
        raise RelayError(
            f"{option} {path} cannot be written ({error.strerror}): give a file in a folder where you may write."
        ) from error
