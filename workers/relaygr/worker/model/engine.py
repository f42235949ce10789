"""Builds the engine of a checkpoint on a device, for one element type of stored K,V."""

from __future__ import annotations

from pathlib import Path

from relaygr.worker.device import Device, open_device, set_threads
from relaygr.worker.kv import KvDtype
from relaygr.worker.model.checkpoint import Checkpoint, load_checkpoint
from relaygr.worker.model.interface import Engine
from relaygr.worker.model.null_engine import NullEngine
from relaygr.worker.model.options import DEFAULT_PAGE_TOKENS, ComputeDtype, Family
from relaygr.worker.model.paged_engine import PagedEngine


def load_engine(
    path: Path,
    device: str | None = None,
    kv_dtype: KvDtype = KvDtype.FLOAT32,
    page_tokens: int = DEFAULT_PAGE_TOKENS,
    threads: int | None = None,
    compute_dtype: ComputeDtype = ComputeDtype.FLOAT32,
    graphs: bool = False,
) -> Engine:
    """An engine for the checkpoint folder `path`, on the device that the setting names (`open_device`).

    `threads`: CPU threads of one operator, process-wide; None keeps torch's default. Raises RelayError if the
    checkpoint is missing or broken, or the device is missing.
    """
    if threads is not None:
        set_threads(threads)
    opened = open_device(device)
    return build_engine(load_checkpoint(path), opened, kv_dtype, page_tokens, compute_dtype, graphs)


def build_engine(
    checkpoint: Checkpoint,
    device: Device,
    kv_dtype: KvDtype,
    page_tokens: int,
    compute_dtype: ComputeDtype = ComputeDtype.FLOAT32,
    graphs: bool = False,
) -> Engine:
    """An engine for a checkpoint in memory. `graphs`: run forwards from captured graphs (`graphs.py`)."""
    if checkpoint.config.family is Family.NULL:
        return NullEngine(checkpoint, device, kv_dtype, page_tokens, compute_dtype)
    return PagedEngine(checkpoint, device, kv_dtype, page_tokens, compute_dtype, graphs=graphs)
