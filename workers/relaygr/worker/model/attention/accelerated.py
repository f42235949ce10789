"""Back ends made for one kind of accelerator, and whether they can run here.

Each needs a library that may be missing, or be there and not work (Triton without a compiler, an operator package of
another version). Then one warning says so and why, and attention is computed by plain torch on the same device.
"""

from __future__ import annotations

import structlog

from relaygr.worker.device import Device
from relaygr.worker.kv import KvGeometry
from relaygr.worker.model.attention.interface import Attention
from relaygr.worker.model.attention.spec import AttentionSpec

_WARM_UP_TOKENS = 4096
"""Block sizes are tuned on chunks of half of it, and on requests against as many tokens."""

log = structlog.get_logger(__name__)


def accelerated_attention(spec: AttentionSpec, geometry: KvGeometry, device: Device) -> Attention | None:
    """The back end made for this device, or None: there is none for it, or for such a mask, or it does not run."""
    try:
        match device.torch_device.type:
            case "cuda" if spec.is_plain_but_for_groups:
                return _triton(spec, geometry, device)
            case "npu" if spec.is_plain:
                return _rec_sdk(spec)
            case _:
                return None
    # Compilers and operator packages fail in ways of their own, and plain torch is always there.
    except Exception as error:
        log.warning("no kernels for this device, plain torch instead", device=device.name, error=repr(error))
        return None


def _triton(spec: AttentionSpec, geometry: KvGeometry, device: Device) -> Attention:
    from relaygr.worker.model.attention.triton_attention import TritonAttention, warm_up

    attention = TritonAttention(spec, device)
    warm_up(attention, spec, geometry, device, _WARM_UP_TOKENS)
    return attention


def _rec_sdk(spec: AttentionSpec) -> Attention | None:
    from relaygr.worker.model.attention.rec_sdk import RecSdkAttention, load_operators

    return RecSdkAttention(spec) if load_operators() and RecSdkAttention.fits(spec) else None
