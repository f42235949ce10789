"""Builds the engine of a checkpoint on a device, for one element type of stored K,V; and the engine without a model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import structlog
import torch
from numpy.typing import NDArray

from relaygr.runtime.errors import RelayError
from relaygr.runtime.limits import usable_cores
from relaygr.schemas.messages import Behaviours
from relaygr.worker.device import Device, open_device, set_threads
from relaygr.worker.kv import KvDtype
from relaygr.worker.model.attention.spec import torch_dtype
from relaygr.worker.model.base_engine import BaseEngine
from relaygr.worker.model.checkpoint import Checkpoint, load_checkpoint, resident_bytes
from relaygr.worker.model.inputs.tables import DEVICE_TABLE_BYTES
from relaygr.worker.model.inputs.tokens import Column, no_tokens
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

log = structlog.get_logger(__name__)


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
) -> Engine:
    """An engine for the checkpoint folder `path`, on the device that the setting names (`open_device`).

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
    return build_engine(load_checkpoint(path), opened, kv, page_tokens, compute, graphs, device_table_bytes)


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
    wanted = resident_bytes(path, device_table_bytes, torch_dtype(compute), device.torch_device.type)
    free = device.memory().free_bytes
    if wanted > free:
        raise NoMemoryForWeightsError(
            f"The weights in {path} need {wanted / 2**30:.2f} GiB of memory, but the machine and its container have "
            f"{free / 2**30:.2f} GiB free: free memory, or raise the container's limit."
        )


def build_engine(
    checkpoint: Checkpoint,
    device: Device,
    kv_dtype: KvDtype,
    page_tokens: int,
    compute_dtype: ComputeDtype = ComputeDtype.FLOAT32,
    graphs: bool = False,
    device_table_bytes: int = DEVICE_TABLE_BYTES,
) -> Engine:
    """An engine for a checkpoint in memory. `graphs`: run forwards from captured graphs (`graphs.py`).

    Raises RelayError if the device has no products of this type.
    """
    if compute_dtype is ComputeDtype.INT8:
        _require_int8(device)
    if checkpoint.config.family is Family.NULL:
        return NullEngine(checkpoint, device, kv_dtype, page_tokens, compute_dtype)
    return PagedEngine(
        checkpoint,
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


class NullEngine(BaseEngine):
    """Computes nothing, to measure the pipeline around the model. It needs no weights.

    Prefixes take as many pages as those of a real model, but nothing is written to them. The score of a candidate is a
    fixed function of its item id, in [0, 1), so that a test notices when two answers are exchanged.
    """

    backend = "none"
    passes_to_warm = 0

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
        return PrefixInputs(no_tokens(self.layout.tokens(len(behaviours))), 0)

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
        rows = no_tokens(candidates.size)
        rows[:, Column.CONTENT] = candidates
        return RankInputs(prefix_tokens, pages, rows, 0, int(candidates.size), 0)

    def forward(self, chunks: Sequence[PrefixChunk], requests: Sequence[RankInputs]) -> list[RankOutputs]:
        for chunk in chunks:
            if self.geometry.pages_for(chunk.end) > len(chunk.pages):
                raise ValueError(f"{chunk.end} tokens do not fit into {len(chunk.pages)} pages")
        return [RankOutputs(null_scores(request.rows[:, Column.CONTENT], self.num_tasks)) for request in requests]
