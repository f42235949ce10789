"""Builds the engine of a model on a device: of our own layers, or of a team's ranker."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import structlog
import torch
from torch import nn

from relaygr.ranker import ModelFolder, PagedRanker, Ranker
from relaygr.ranker.interface import version_of
from relaygr.runtime.errors import RelayError
from relaygr.runtime.limits import usable_cores
from relaygr.worker.device import Device, open_device, set_threads
from relaygr.worker.kv import KvDtype
from relaygr.worker.model.attention.choose import AttentionChooser, choose_attention
from relaygr.worker.model.attention.spec import torch_dtype
from relaygr.worker.model.checkpoint import Checkpoint, file_identity, load_checkpoint, resident_bytes
from relaygr.worker.model.config import WEIGHTS_FILE, PrefixRules, is_ranker
from relaygr.worker.model.contiguous import ContiguousRanker
from relaygr.worker.model.description import description_of
from relaygr.worker.model.inputs.known import KnownInputs
from relaygr.worker.model.inputs.tables import DEVICE_TABLE_BYTES
from relaygr.worker.model.interface import Engine
from relaygr.worker.model.null import NullRanker
from relaygr.worker.model.options import DEFAULT_PAGE_TOKENS, ComputeDtype, Family
from relaygr.worker.model.own_layers import OwnLayers
from relaygr.worker.model.ranker_engine import RankerEngine
from relaygr.worker.model.rankers import (
    RankerConfig,
    RankerFolder,
    RankerRecord,
    files_bytes,
    model_files,
    ranker_class,
    ranker_code,
    read_ranker,
    read_ranker_config,
    require_sizes,
)

log = structlog.get_logger(__name__)

_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_BATCH_NORM = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)

Model: TypeAlias = Checkpoint | RankerFolder
"""A model of our own layers, or a team's own ranker."""


class NoMemoryForWeightsError(RelayError):
    """The weights are larger than the free memory."""


def load_engine(
    path: Path,
    device: str | None = None,
    kv_dtype: KvDtype | None = None,
    page_tokens: int = DEFAULT_PAGE_TOKENS,
    threads: int | None = None,
    compute_dtype: ComputeDtype | None = None,
    graphs: bool = False,
    device_table_bytes: int = DEVICE_TABLE_BYTES,
    ranker_modules: Sequence[str] = (),
) -> Engine:
    """An engine for the model in the folder `path`, on the device that the setting names (`open_device`).

    `kv_dtype`, `compute_dtype`: None is the device's default (`default_dtypes`). `threads`: CPU threads of one
    operator, process-wide; None is torch's default, within the CPU quota of the container. `device_table_bytes`: larger
    tables stay in host memory. Raises RelayError if the checkpoint is missing, broken, or larger than the free memory,
    if the device is missing, or if it has no instructions for products in int8.
    """
    set_threads(threads if threads is not None else min(torch.get_num_threads(), usable_cores()))
    opened = open_device(device)
    # This thread measures, and those that it starts serve.
    opened.bind_thread()
    default_kv, default_compute = default_dtypes(opened)
    kv, compute = kv_dtype or default_kv, compute_dtype or default_compute
    log.info(
        "element types",
        device=opened.name,
        kv=kv.value,
        kv_from="the device" if kv_dtype is None else "the settings",
        products=compute.value,
        products_from="the device" if compute_dtype is None else "the settings",
    )
    # `build_engine` would refuse it, too, but only after the weights are read.
    if compute is ComputeDtype.INT8:
        _require_int8(opened)
    if opened.is_cpu:
        _require_memory(path, opened, compute, device_table_bytes)
    return build_engine(load_model(path), opened, kv, page_tokens, compute, graphs, device_table_bytes, ranker_modules)


def load_model(path: Path) -> Model:
    """The model in a folder, without running code. Raises RelayError if it is missing or broken."""
    return read_ranker(path) if is_ranker(path) else load_checkpoint(path)


def weights_identity(path: Path) -> tuple[int, int, int] | None:
    """Of the weights in a folder, or of all files of a ranker: another one after each save. None without weights, or
    while they cannot be read.
    """
    if not is_ranker(path):
        return file_identity(path / WEIGHTS_FILE)
    try:
        found = [identity for identity in map(file_identity, model_files(path)) if identity is not None]
    except RelayError:
        return None
    inodes, sizes, times_ns = zip(*found, strict=True) if found else ((), (), ())
    return sum(inodes), sum(sizes), max(times_ns, default=0)


def engine_to_check(path: Path, device: str | None, ranker_modules: Sequence[str]) -> Engine:
    """An engine in float32 whose rules are to be found out: a ranker of a team's own claims them all.

    Raises RelayError as `load_engine` does.
    """
    if not is_ranker(path):
        return load_engine(path, device, KvDtype.FLOAT32, compute_dtype=ComputeDtype.FLOAT32)
    opened, config = open_device(device), read_ranker_config(path)
    ranker = open_ranker(path, config, opened, ComputeDtype.FLOAT32, ranker_modules)
    claimed = PrefixRules(grows=True, chunks=True, uses_query_time=True)
    record = RankerRecord(config.ranker, version_of(type(ranker)), ranker.shape(), claimed)
    return build_engine(
        read_ranker(path, record),
        opened,
        KvDtype.FLOAT32,
        DEFAULT_PAGE_TOKENS,
        ComputeDtype.FLOAT32,
        ranker_modules=ranker_modules,
    )


def default_dtypes(device: Device) -> tuple[KvDtype, ComputeDtype]:
    """The element types of K,V and of products without a setting: bfloat16 on an accelerator with products in it."""
    if device.prefers_bfloat16:
        return KvDtype.BFLOAT16, ComputeDtype.BFLOAT16
    return KvDtype.FLOAT32, ComputeDtype.FLOAT32


def _require_int8(device: Device) -> None:
    """Raises RelayError. Without these instructions the sums of products in int8 may overflow, and are slow."""
    if device.has_int8_products:
        return
    instead = "float32" if device.is_cpu else "float32 or bfloat16"
    raise RelayError(
        f"compute_dtype int8 needs a CPU with VNNI (avx512_vnni, avx_vnni or amx_int8), and {device.name} "
        f"({device.description}) is none: set worker.compute_dtype to {instead}."
    )


def _require_memory(path: Path, device: Device, compute: ComputeDtype, device_table_bytes: int) -> None:
    """Raises NoMemoryForWeightsError: the kernel would kill the process while it loads."""
    wanted = memory_bytes(path, device_table_bytes, compute, device)
    free = device.memory().free_bytes
    if wanted > free:
        raise NoMemoryForWeightsError(
            f"The weights in {path} need {wanted / 2**30:.2f} GiB of memory, but the machine and its container have "
            f"{free / 2**30:.2f} GiB free: free memory, or raise the container's limit."
        )


def memory_bytes(path: Path, device_table_bytes: int, compute: ComputeDtype, device: Device) -> int:
    """Memory for the weights in a folder and what products keep of them, without large tables. Reads no weights."""
    if is_ranker(path):
        return files_bytes(path)
    return resident_bytes(path, device_table_bytes, torch_dtype(compute), device.torch_device.type)


def build_engine(
    model: Model,
    device: Device,
    kv_dtype: KvDtype,
    page_tokens: int,
    compute_dtype: ComputeDtype = ComputeDtype.FLOAT32,
    graphs: bool = False,
    device_table_bytes: int = DEVICE_TABLE_BYTES,
    ranker_modules: Sequence[str] = (),
) -> Engine:
    """An engine for a model that was read. `graphs`: run forwards from captured graphs (`graphs.py`).
    `ranker_modules`: of rankers whose code may run.

    Raises RelayError if the device has no products of this type, and for a ranker that may not run or fails.
    """
    if isinstance(model, RankerFolder):
        return _team_engine(model, device, kv_dtype, page_tokens, compute_dtype, ranker_modules)
    if compute_dtype is ComputeDtype.INT8:
        _require_int8(device)
    return own_engine(
        model,
        device,
        kv_dtype,
        page_tokens,
        compute_dtype,
        graphs=graphs,
        device_table_bytes=device_table_bytes,
    )


def own_engine(
    checkpoint: Checkpoint,
    device: Device,
    kv_dtype: KvDtype,
    page_tokens: int,
    compute_dtype: ComputeDtype = ComputeDtype.FLOAT32,
    choose: AttentionChooser = choose_attention,
    graphs: bool = False,
    device_table_bytes: int = DEVICE_TABLE_BYTES,
) -> RankerEngine:
    """An engine of our own layers. `choose`: selects the attention back end; tests pass their own."""
    config = checkpoint.config
    description = description_of(config)
    geometry = description.geometry(page_tokens, kv_dtype)
    ranker: PagedRanker
    if config.family is Family.NULL:
        ranker, weights_bytes = NullRanker(config), checkpoint.weights_bytes
    else:
        ranker = OwnLayers(checkpoint, device, geometry, compute_dtype, choose, graphs, device_table_bytes)
        weights_bytes = ranker.weights_bytes
    return RankerEngine(
        ranker,
        description,
        checkpoint.revision,
        KnownInputs.of(config),
        weights_bytes,
        device,
        geometry,
        compute_dtype,
    )


def _team_engine(
    model: RankerFolder,
    device: Device,
    kv_dtype: KvDtype,
    page_tokens: int,
    compute_dtype: ComputeDtype,
    allowed: Sequence[str],
) -> RankerEngine:
    """Raises RelayError as `open_ranker` does, and if code or sizes are not those that were checked."""
    name, record = model.config.ranker, model.record
    made = open_ranker(model.path, model.config, device, compute_dtype, allowed)
    if (version_of(type(made)), made.shape()) != (record.version, record.shape):
        raise RelayError(
            f"The ranker {name} has changed since {model.path} was checked: run `relaygr model check {model.path}` "
            "again, and restart processes that loaded the code before."
        )
    ranker = ContiguousRanker(made, name, device) if isinstance(made, Ranker) else made
    description = record.description()
    with ranker_code(f"{name}.known_items"):
        # Made now, so that an error has its name.
        _ = ranker.vocabulary
    return RankerEngine(
        ranker,
        description,
        model.revision,
        KnownInputs(description.features, record.shape.num_actions),
        model.files_bytes,
        device,
        description.geometry(page_tokens, kv_dtype),
        compute_dtype,
        record,
    )


def open_ranker(
    path: Path, config: RankerConfig, device: Device, dtype: ComputeDtype, allowed: Sequence[str]
) -> Ranker | PagedRanker:
    """The ranker of a folder. Raises RelayError if its code may not run, or fails."""
    kind = ranker_class(config.ranker, allowed)
    if dtype is ComputeDtype.INT8:
        raise RelayError("compute_dtype int8 is of our own layers: a ranker of your own takes float32 or bfloat16.")
    try:
        ranker = kind(ModelFolder(path, config.options, device.torch_device, torch_dtype(dtype)))
        require_sizes(config.ranker, ranker.shape())
        if not isinstance(getattr(ranker, "folder", None), ModelFolder):
            raise RelayError(
                f"The ranker {config.ranker} does not keep the `folder` that it is given: call "
                "`super().__init__(folder)` in its `__init__`, and name nn.Module after Ranker if it is a base, too."
            )
        _require_eval(config.ranker, ranker)
    except RelayError:
        raise
    # Whatever a team's code raises, the operator is told which code it was.
    except (Exception, SystemExit) as error:
        raise RelayError(
            f"The ranker {config.ranker} cannot be made from {path}: {type(error).__name__}: {error}."
        ) from error
    return ranker


def _require_eval(name: str, ranker: Ranker | PagedRanker) -> None:
    """Raises RelayError for a layer that computes as in training. Experiments do not find batch norm: with it the same
    request has the same scores, but not those of the model that was evaluated.
    """
    for attribute, part in {"": ranker, **vars(ranker)}.items():
        for path, layer in part.named_modules() if isinstance(part, nn.Module) else ():
            drops = isinstance(layer, _DROPOUT) and layer.p > 0
            if layer.training and (drops or (isinstance(layer, _BATCH_NORM) and layer.track_running_stats)):
                where = ".".join(filter(None, (name, attribute, path)))
                raise RelayError(
                    f"{where} ({type(layer).__name__}) is in training mode, in which it computes other scores: call "
                    "`.eval()` on the module when its weights are loaded."
                )
