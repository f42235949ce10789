"""`relaygr model check-kv`, `check-dram` and `check-compute`, the old names of a part of `relaygr model check`.

They go in the release after the next.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from relaygr.cli.model_check import (
    EXIT_REFUSED,
    Interactions,
    Limits,
    MaxScoreError,
    MinTopkOverlap,
    Model,
    Users,
    print_types,
    sample_of,
)
from relaygr.cli.model_options import (
    ComputeDtypeOption,
    DeviceOption,
    DramKvDtypeOption,
    KvDtypeOption,
    RankerModulesOption,
)
from relaygr.cli.options import ColumnsOption, JsonOption
from relaygr.cli.texts import plain_console, print_json, prints_to_stderr, stdout_console
from relaygr.runtime.errors import RelayError
from relaygr.worker.kv import DramKvDtype, KvDtype
from relaygr.worker.model.options import ComputeDtype

if TYPE_CHECKING:
    from relaygr.worker.type_check import ServedType


def check_kv_command(
    model: Model,
    kv_dtype: Annotated[KvDtype, typer.Option(help="Element type of K,V on the device.")] = KvDtype.INT8,
    compute_dtype: ComputeDtypeOption = None,
    interactions: Interactions = None,
    columns: ColumnsOption = None,
    users: Users = None,
    device: DeviceOption = None,
    ranker_module: RankerModulesOption = None,
    max_score_error: MaxScoreError = None,
    min_topk_overlap: MinTopkOverlap = None,
    as_json: JsonOption = False,
) -> None:
    """The old name of `relaygr model check MODEL --kv-dtype TYPE`, without the rules."""
    limits = Limits(max_score_error, min_topk_overlap)
    sample = interactions, users, columns
    _measure("check-kv", model, kv_dtype, kv_dtype, compute_dtype, sample, device, ranker_module, limits, as_json)


def check_dram_command(
    model: Model,
    dram_kv_dtype: DramKvDtypeOption = DramKvDtype.INT8,
    interactions: Interactions = None,
    columns: ColumnsOption = None,
    users: Users = None,
    kv_dtype: KvDtypeOption = None,
    device: DeviceOption = None,
    ranker_module: RankerModulesOption = None,
    max_score_error: MaxScoreError = None,
    min_topk_overlap: MinTopkOverlap = None,
    as_json: JsonOption = False,
) -> None:
    """The old name of `relaygr model check MODEL --dram-kv-dtype TYPE`, without the rules."""
    limits = Limits(max_score_error, min_topk_overlap)
    sample = interactions, users, columns
    _measure("check-dram", model, dram_kv_dtype, kv_dtype, None, sample, device, ranker_module, limits, as_json)


def check_compute_command(
    model: Model,
    compute_dtype: Annotated[ComputeDtype, typer.Option(help="Element type of matrix products.")] = ComputeDtype.INT8,
    interactions: Interactions = None,
    columns: ColumnsOption = None,
    users: Users = None,
    device: DeviceOption = None,
    ranker_module: RankerModulesOption = None,
    max_score_error: MaxScoreError = None,
    min_topk_overlap: MinTopkOverlap = None,
    as_json: JsonOption = False,
) -> None:
    """The old name of `relaygr model check MODEL --compute-dtype TYPE`, without the rules."""
    limits = Limits(max_score_error, min_topk_overlap)
    sample = interactions, users, columns
    _measure("check-compute", model, compute_dtype, None, None, sample, device, ranker_module, limits, as_json)


def _measure(
    name: str,
    model: Path,
    dtype: ServedType,
    kv_dtype: KvDtype | None,
    compute_dtype: ComputeDtype | None,
    sample: tuple[Path | None, int | None, str | None],
    device: str | None,
    ranker_modules: list[str] | None,
    limits: Limits,
    as_json: bool,
) -> None:
    """Measures one type, and prints it as the old command did. Raises RelayError, and typer.Exit beyond the limits."""
    from relaygr.runtime.logs import configure_logging
    from relaygr.runtime.settings import LogLevel, LogSettings
    from relaygr.worker.model.engine import engine_to_check
    from relaygr.worker.type_check import TypeCheck

    configure_logging(LogSettings(level=LogLevel.WARNING))
    allowed = ranker_modules or ()
    with prints_to_stderr():
        users, candidates = sample_of(model, engine_to_check(model, device, allowed), *sample)
        checking = TypeCheck(model, device, allowed, kv_dtype, compute_dtype)
        [found] = checking.run([dtype], users, candidates, float("inf"))
    option = found.setting.replace("_", "-")
    plain_console(stderr=True).print(
        f"`relaygr model {name}` is deprecated: use `relaygr model check {model} --{option} {dtype}`.", soft_wrap=True
    )
    if found.error is None:
        raise RelayError(found.not_measured)
    is_within = limits.are_kept(found)
    if as_json:
        print_json({**asdict(found.error), found.setting: dtype, "within_limits": is_within})
    else:
        print_types(stdout_console(), [found], limits)
    if not is_within:
        raise typer.Exit(EXIT_REFUSED)
