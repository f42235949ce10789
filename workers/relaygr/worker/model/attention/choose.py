"""Chooses a model's attention back end on a device, at load, and logs the choice with its reason.

A back end made for one kind of accelerator needs a library that may be missing or broken (Triton without a compiler,
an operator package of another version). Then one warning gives the reason, and plain torch is used on the same device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import structlog
import torch

from relaygr.worker.device import Device
from relaygr.worker.kv import KvGeometry
from relaygr.worker.model.attention.bias import RelativeBiases
from relaygr.worker.model.attention.blocked import ONEDNN_WORK, BlockedAttention
from relaygr.worker.model.attention.interface import AttentionBackend
from relaygr.worker.model.attention.softmax import SoftmaxAttention
from relaygr.worker.model.attention.spec import AttentionSpec
from relaygr.worker.model.attention.tiled import TiledAttention
from relaygr.worker.model.compiled.attention import CompiledAttention
from relaygr.worker.model.layer_parts import onednn_is_faster

AttentionChooser = Callable[[AttentionSpec, RelativeBiases | None, KvGeometry, Device], AttentionBackend]

_PLAIN = "the plain mask"
_WARM_UP_TOKENS = 4096
"""Block sizes are tuned on a chunk of half as many tokens, and on requests against half as many."""

log = structlog.get_logger(__name__)


def accelerated_attention(
    spec: AttentionSpec, biases: RelativeBiases | None, geometry: KvGeometry, device: Device
) -> AttentionBackend | None:
    """The back end made for this device; None if there is none for the device and the mask, or if it fails."""
    try:
        match device.torch_device.type:
            case "cuda" if spec.normalizer is not None:
                return _triton(spec, biases, geometry, device)
            case "npu" if spec.is_plain and not geometry.dtype.is_scaled:
                return _rec_sdk(spec)
            case _:
                return None
    # Compilers and operator packages may raise any error, and plain torch always works.
    except Exception as error:
        log.warning("no kernels for this device, plain torch instead", device=device.name, error=repr(error))
        return None


def _triton(
    spec: AttentionSpec, biases: RelativeBiases | None, geometry: KvGeometry, device: Device
) -> AttentionBackend:
    from relaygr.worker.model.triton.attention import TritonAttention, warm_up
    from relaygr.worker.model.triton.launch import check_stored_type

    check_stored_type(geometry.dtype, device.torch_device)
    attention = TritonAttention(spec, device, biases)
    warm_up(attention, spec, geometry, device, _WARM_UP_TOKENS)
    return attention


def _rec_sdk(spec: AttentionSpec) -> AttentionBackend | None:
    from relaygr.worker.model.attention.rec_sdk import RecSdkAttention, load_operators

    return RecSdkAttention(spec) if load_operators() and RecSdkAttention.fits(spec) else None


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """A back end, and the reason for the choice."""

    attention: AttentionBackend
    reason: str


def choose_attention(
    spec: AttentionSpec, biases: RelativeBiases | None, geometry: KvGeometry, device: Device
) -> AttentionBackend:
    """The fastest back end that computes the model's attention and runs on the device."""
    kind = device.torch_device.type
    for_device = accelerated_attention(spec, biases, geometry, device)
    if for_device is None:
        choice = attention_for(spec, biases, kind, geometry)
    else:
        choice = BackendChoice(for_device, f"{', '.join(_options(spec)) or _PLAIN} on {kind}")
    log.info("attention back end", name=choice.attention.name, device=device.name, reason=choice.reason)
    if kind == "cuda" and for_device is None:
        log.warning("plain torch starts many short kernels in each layer, and leaves a GPU mostly idle")
    return choice.attention


def attention_for(
    spec: AttentionSpec, biases: RelativeBiases | None, device_type: str = "cpu", geometry: KvGeometry | None = None
) -> BackendChoice:
    """The back end in plain torch, which runs on any device, and the reason for the choice.

    `geometry`: of the pages that it reads, if their attention may be compiled.
    """
    if spec.normalizer is None:
        return BackendChoice(SoftmaxAttention(spec, biases), "the family is softmax")
    if not spec.is_plain:
        return BackendChoice(TiledAttention(spec, biases), f"the reference path, for {', '.join(_options(spec))}")
    if device_type != "cpu" or spec.compute_dtype is not torch.float32:
        return BackendChoice(BlockedAttention(spec), _PLAIN)
    by_onednn = onednn_is_faster()
    attention = BlockedAttention(spec, ONEDNN_WORK if by_onednn else math.inf, _compiled(geometry, spec.may_round))
    return BackendChoice(attention, f"{_PLAIN}, products of large tiles by oneDNN" if by_onednn else _PLAIN)


def _compiled(geometry: KvGeometry | None, may_round: bool) -> CompiledAttention | None:
    """Attention on K,V in pages in machine code; None without llvmlite or for pages or processors that do not fit."""
    if geometry is None or not CompiledAttention.fits(geometry):
        return None
    for bfloat16 in (True, False) if may_round and CompiledAttention.in_bfloat16(geometry) else (False,):
        try:
            return CompiledAttention(geometry, bfloat16=bfloat16)
        except ImportError:
            return None
        # LLVM may raise any error, and plain torch always works.
        except Exception as error:
            instead = "float32" if bfloat16 else "plain torch"
            log.warning("attention on K,V in pages is not compiled", instead=instead, error=repr(error))
    return None


def _options(spec: AttentionSpec) -> list[str]:
    """The options of the mask that the plain mask does not have."""
    asked = {
        "the contextual mask": spec.contextual_tokens > 0,
        "max_attn_len": spec.max_attn_len > 0,
        "target groups": spec.target_group_size > 1,
        "relative bias": spec.has_bias,
    }
    return [name for name, is_asked in asked.items() if is_asked]
