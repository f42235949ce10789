"""`relaygr model check-kv MODEL`, `check-dram` and `check-compute`: the score error of inexact settings for a model.

The commands import torch only when they run, so that `--help` answers without it.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
import typer
from rich.table import Table

from relaygr.cli.model_options import (
    ComputeDtypeOption,
    DeviceOption,
    DramKvDtypeOption,
    KvDtypeOption,
    RankerModulesOption,
)
from relaygr.cli.options import ColumnsOption, JsonOption
from relaygr.cli.texts import plain_console, print_json, stdout_console
from relaygr.ingest.known import KnownModel, named_log
from relaygr.ingest.reading import read_interactions
from relaygr.runtime.errors import RelayError
from relaygr.worker.kv import DramGeometry, DramKvDtype, KvDtype, KvGeometry
from relaygr.worker.model.options import ComputeDtype
from relaygr.worker.settings import WorkerSettings

if TYPE_CHECKING:
    from relaygr.worker.model.interface import Engine
    from relaygr.worker.score_error import SampleUser, ScoreError

EXIT_ABOVE = 1
CANDIDATES = 100
_DEFAULTS = WorkerSettings.model_fields

# A link is resolved once: each command loads the model several times.
Model = Annotated[Path, typer.Argument(help="A checkpoint folder.", resolve_path=True)]
Interactions = Annotated[
    Path | None, typer.Option(help="Interaction log with the histories to rank.", show_default="random histories")
]
Users = Annotated[int | None, typer.Option(min=1, help="Number of users.", show_default="16 random, 100 from a log")]


def check_kv_command(
    model: Model,
    kv_dtype: Annotated[KvDtype, typer.Option(help="Element type of K,V on the device.")] = KvDtype.INT8,
    compute_dtype: ComputeDtypeOption = None,
    interactions: Interactions = None,
    columns: ColumnsOption = None,
    users: Users = None,
    device: DeviceOption = None,
    ranker_module: RankerModulesOption = None,
    max_score_error: Annotated[float, typer.Option(min=0.0, help="Limit, as worker.kv_max_score_error.")] = float(
        _DEFAULTS["kv_max_score_error"].default
    ),
    min_topk_overlap: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Limit, as worker.kv_min_topk_overlap.")
    ] = float(_DEFAULTS["kv_min_topk_overlap"].default),
    as_json: JsonOption = False,
) -> None:
    """Measure how much K,V in fewer bits change a model's scores. The exit code is 1 beyond the limits."""
    from relaygr.worker.model.engine import load_engine
    from relaygr.worker.score_error import exact_kv, measure_engine_error

    allowed = ranker_module or ()
    engine = load_engine(model, device, kv_dtype, compute_dtype=compute_dtype, ranker_modules=allowed)
    wide = exact_kv(engine.compute_dtype)
    exact = load_engine(model, device, wide, compute_dtype=engine.compute_dtype, ranker_modules=allowed)
    error = measure_engine_error(engine, exact, *sample_of(model, engine, interactions, users, columns))
    what = f"K,V {kv_dtype}, compared with {wide}: {_room(exact.geometry, engine.geometry)}"
    _report(what, {"kv_dtype": kv_dtype}, error, max_score_error, min_topk_overlap, as_json)


def check_dram_command(
    model: Model,
    dram_kv_dtype: DramKvDtypeOption = DramKvDtype.INT8,
    interactions: Interactions = None,
    columns: ColumnsOption = None,
    users: Users = None,
    kv_dtype: KvDtypeOption = None,
    device: DeviceOption = None,
    ranker_module: RankerModulesOption = None,
    max_score_error: Annotated[float, typer.Option(min=0.0, help="Limit, as worker.dram_max_score_error.")] = float(
        _DEFAULTS["dram_max_score_error"].default
    ),
    min_topk_overlap: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Limit, as worker.dram_min_topk_overlap.")
    ] = float(_DEFAULTS["dram_min_topk_overlap"].default),
    as_json: JsonOption = False,
) -> None:
    """Measure how much an inexact DRAM tier changes a model's scores. The exit code is 1 beyond the limits."""
    from relaygr.worker.model.engine import load_engine
    from relaygr.worker.score_error import measure_dram_error

    engine = load_engine(model, device, kv_dtype, ranker_modules=ranker_module or ())
    error = measure_dram_error(engine, dram_kv_dtype, *sample_of(model, engine, interactions, users, columns))
    room = _room(engine.geometry, DramGeometry(engine.geometry, dram_kv_dtype))
    what = f"K,V {engine.geometry.dtype} on the device, {dram_kv_dtype} in DRAM: {room}"
    _report(what, {"dram_kv_dtype": dram_kv_dtype}, error, max_score_error, min_topk_overlap, as_json)


def check_compute_command(
    model: Model,
    compute_dtype: Annotated[
        ComputeDtype, typer.Option(help="Element type of matrix products, compared with float32.")
    ] = ComputeDtype.INT8,
    interactions: Interactions = None,
    columns: ColumnsOption = None,
    users: Users = None,
    device: DeviceOption = None,
    ranker_module: RankerModulesOption = None,
    max_score_error: Annotated[float, typer.Option(min=0.0, help="Limit, as worker.compute_max_score_error.")] = float(
        _DEFAULTS["compute_max_score_error"].default
    ),
    min_topk_overlap: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Limit, as worker.compute_min_topk_overlap.")
    ] = float(_DEFAULTS["compute_min_topk_overlap"].default),
    as_json: JsonOption = False,
) -> None:
    """Measure how much products in fewer bits change a model's scores. The exit code is 1 beyond the limits."""
    from relaygr.worker.model.engine import load_engine
    from relaygr.worker.score_error import measure_engine_error

    engine, exact = (
        load_engine(model, device, compute_dtype=dtype, ranker_modules=ranker_module or ())
        for dtype in (compute_dtype, ComputeDtype.FLOAT32)
    )
    error = measure_engine_error(engine, exact, *sample_of(model, engine, interactions, users, columns))
    what = f"products in {compute_dtype}, compared with float32"
    _report(what, {"compute_dtype": compute_dtype}, error, max_score_error, min_topk_overlap, as_json)


def sample_of(
    model: Path, engine: Engine, interactions: Path | None, users: int | None, columns: str | None
) -> tuple[list[SampleUser], np.ndarray]:
    """The users to rank, and the candidates: of the log, or random without one."""
    from relaygr.worker.score_error import MADE_USERS, made_sample

    if interactions is None:
        return made_sample(engine, users or MADE_USERS)
    return _read_sample(model, interactions, engine, users or 100, columns)


def _read_sample(
    model: Path, path: Path, engine: Engine, users: int, columns: str | None
) -> tuple[list[SampleUser], np.ndarray]:
    """Random users of a log with their newest behaviours, and random items of the log as candidates."""
    from relaygr.worker.score_error import SampleUser

    read, random = read_interactions(path, log_map=named_log(columns, None, model)), np.random.default_rng(0)
    if not read.users:
        raise RelayError(f"{path} contains no interactions.")
    for note in KnownModel(model).check_log(read):
        plain_console(stderr=True).print(f"Note: {note}")
    chosen = random.choice(len(read.users), min(users, len(read.users)), replace=False)
    longest = engine.limits.max_prefix_behaviours
    items = np.unique(read.behaviours.items)
    candidates = random.choice(items, min(CANDIDATES, engine.limits.max_candidates, items.size), replace=False)
    features = np.empty(0, np.int64)
    return [SampleUser(features, read.of(int(index))[-longest:]) for index in chosen], candidates


def _room(exact: KvGeometry, smaller: KvGeometry | DramGeometry) -> str:
    return f"{exact.page_bytes / smaller.page_bytes:.2f} times as many prefixes in the same memory"


def _report(
    what: str,
    setting: dict[str, str],
    error: ScoreError,
    max_score_error: float,
    min_topk_overlap: float,
    as_json: bool,
) -> None:
    """Prints the error beside its limits. Raises typer.Exit if one of them is exceeded."""
    from relaygr.worker.score_error import TOP_K

    is_within = error.is_within(max_score_error, min_topk_overlap)
    if as_json:
        print_json({**asdict(error), **setting, "within_limits": is_within})
    else:
        console = stdout_console()
        console.print(f"{what}; {error.users} users, {error.candidates} candidates each")
        table = Table("", "measured", "limit")
        table.add_row("largest change of a score", f"{error.max_score_error:.4%}", f"{max_score_error:.4%} at most")
        table.add_row("mean change of a score", f"{error.mean_score_error:.4%}", "")
        table.add_row(
            f"share of the top {TOP_K} that stays", f"{error.topk_overlap:.2%}", f"{min_topk_overlap:.2%} at least"
        )
        console.print(table)
        console.print("Changes are relative to the spread of the scores of the same user and task.")
    if not is_within:
        raise typer.Exit(EXIT_ABOVE)
