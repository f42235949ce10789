"""Builds the engine of a checkpoint on a device, for one element type of stored K,V; and the engine without a model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias, cast

import numpy as np
import structlog
import torch
from numpy.typing import NDArray

from relaygr.ranker.interface import version_of
from relaygr.runtime.errors import RelayError
from relaygr.runtime.limits import usable_cores
from relaygr.schemas.messages import Behaviours
from relaygr.schemas.record import record
from relaygr.worker.device import Device, open_device, set_threads
from relaygr.worker.kv import KvDtype
from relaygr.worker.model.attention.spec import torch_dtype
from relaygr.worker.model.base_engine import BaseEngine
from relaygr.worker.model.checkpoint import Checkpoint, file_identity, load_checkpoint, resident_bytes
from relaygr.worker.model.config import WEIGHTS_FILE, PrefixRules, is_ranker
from relaygr.worker.model.description import description_of
from relaygr.worker.model.inputs.tables import DEVICE_TABLE_BYTES
from relaygr.worker.model.interface import (
    Engine,
    Int32Array,
    Int64Array,
    PrefixChunk,
    PrefixInputs,
    RankInputs,
    RankOutputs,
)
from relaygr.worker.model.options import DEFAULT_PAGE_TOKENS, ComputeDtype, Family
from relaygr.worker.model.paged_engine import PagedEngine
from relaygr.worker.model.ranker_engine import RankerEngine, open_ranker
from relaygr.worker.model.rankers import (
    RankerFolder,
    RankerRecord,
    files_bytes,
    model_files,
    read_ranker,
    read_ranker_config,
)

log = structlog.get_logger(__name__)


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
    """Of the weights in a folder, or of all files of a ranker: another one after each save. None without weights."""
    if not is_ranker(path):
        return file_identity(path / WEIGHTS_FILE)
    found = [identity for identity in map(file_identity, model_files(path)) if identity is not None]
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
        return RankerEngine(model, device, kv_dtype, page_tokens, compute_dtype, ranker_modules)
    if compute_dtype is ComputeDtype.INT8:
        _require_int8(device)
    if model.config.family is Family.NULL:
        return NullEngine(model, device, kv_dtype, page_tokens, compute_dtype)
    return PagedEngine(
        model,
        device,
        kv_dtype,
        page_tokens,
        compute_dtype,
        graphs=graphs,
        device_table_bytes=device_table_bytes,
    )


def null_scores(items: Int64Array, num_tasks: int) -> NDArray[np.float32]:
    """float32 [items, num_tasks]: 24 bits of Fibonacci hashing of id + task."""
    mixed = (items[:, None] + np.arange(num_tasks)).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return ((mixed >> np.uint64(40)) / np.float32(2**24)).astype(np.float32)


@record(frozen=True, slots=True, kw_only=True)
class _NullRequest(RankInputs):
    candidates: Int64Array


class NullEngine(BaseEngine):
    """Computes nothing, to measure the pipeline around the model. It needs no weights.

    Prefixes take as many pages as those of a real model, but nothing is written to them. The score of a candidate is a
    fixed function of its item id, in [0, 1), so that a test notices when two answers are exchanged.
    """

    backend = "none"
    passes_to_warm = 0

    def __init__(
        self,
        checkpoint: Checkpoint,
        device: Device,
        kv_dtype: KvDtype,
        page_tokens: int,
        compute_dtype: ComputeDtype = ComputeDtype.FLOAT32,
    ) -> None:
        described = description_of(checkpoint.config)
        super().__init__(
            described, checkpoint.revision, checkpoint.vocabulary(), device, kv_dtype, page_tokens, compute_dtype
        )
        self.weights_bytes = checkpoint.weights_bytes

    def scratch_bytes(self, max_chunk_tokens: int, max_batch_rows: int) -> int:  # noqa: ARG002 - it holds no rows
        return 0

    def bind(self, arena: torch.Tensor) -> None:
        if arena.shape[1:] != (self.geometry.page_bytes,):
            raise ValueError(f"arena is {list(arena.shape)}, not [num_pages, {self.geometry.page_bytes}]")

    def shown_features(self, features: Int64Array, behaviours: int, candidates: int) -> Int64Array:  # noqa: ARG002
        return features

    def unknown_actions(self, behaviours: Behaviours) -> int:  # noqa: ARG002
        return 0

    def unknown_features(self, features: Int64Array) -> int:  # noqa: ARG002
        return 0

    def prefix_inputs(
        self,
        features: Int64Array,  # noqa: ARG002
        behaviours: Behaviours,
        query_time_ms: int = 0,  # noqa: ARG002
    ) -> PrefixInputs:
        self._check_prefix(behaviours)
        return PrefixInputs(tokens=self.layout.tokens(len(behaviours)), unknown_items=0)

    def rank_inputs(
        self,
        prefix_tokens: int,
        pages: Int32Array,
        suffix: Behaviours,
        candidates: Int64Array,
        query_time_ms: int = 0,  # noqa: ARG002
        prefix_timestamps_ms: Int64Array | None = None,  # noqa: ARG002
    ) -> RankInputs:
        self._check_request(suffix, candidates)
        return _NullRequest(
            prefix_tokens=prefix_tokens,
            pages=pages,
            num_candidates=int(candidates.size),
            unknown_items=0,
            candidates=candidates,
        )

    def forward(self, chunks: Sequence[PrefixChunk], requests: Sequence[RankInputs]) -> list[RankOutputs]:
        for chunk in chunks:
            if self.geometry.pages_for(chunk.end) > len(chunk.pages):
                raise ValueError(f"{chunk.end} tokens do not fit into {len(chunk.pages)} pages")
        asked = cast("Sequence[_NullRequest]", requests)
        return [RankOutputs(null_scores(request.candidates, self.num_tasks)) for request in asked]
