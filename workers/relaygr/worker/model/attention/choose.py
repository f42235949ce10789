"""Which back end computes a model's attention on a device: chosen at load, and said in the log with the reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import structlog

from relaygr.worker.device import Device
from relaygr.worker.kv import KvGeometry
from relaygr.worker.model.attention.accelerated import accelerated_attention
from relaygr.worker.model.attention.bias import RelativeBiases
from relaygr.worker.model.attention.blocked import BlockedAttention
from relaygr.worker.model.attention.interface import Attention
from relaygr.worker.model.attention.softmax import SoftmaxAttention
from relaygr.worker.model.attention.spec import AttentionSpec
from relaygr.worker.model.attention.tiled import TiledAttention

AttentionChooser = Callable[[AttentionSpec, RelativeBiases | None, KvGeometry, Device], Attention]

_PLAIN = "the plain mask"
_PLAIN_WITH_GROUPS = "the plain mask with groups"
log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Choice:
    """A back end, and why it is this one."""

    attention: Attention
    reason: str


def choose_attention(
    spec: AttentionSpec, biases: RelativeBiases | None, geometry: KvGeometry, device: Device
) -> Attention:
    """The fastest back end that computes what the model asks for, and runs on the device."""
    made_for_it = accelerated_attention(spec, geometry, device)
    choice = (
        attention_for(spec, biases)
        if made_for_it is None
        else Choice(made_for_it, f"{_PLAIN if spec.is_plain else _PLAIN_WITH_GROUPS} on {device.torch_device.type}")
    )
    log.info("attention back end", name=choice.attention.name, device=device.name, reason=choice.reason)
    return choice.attention


def attention_for(spec: AttentionSpec, biases: RelativeBiases | None) -> Choice:
    """The back end in plain torch, which runs on any device, with the reason."""
    if spec.normalizer is None:
        return Choice(SoftmaxAttention(spec, biases), "the family is softmax")
    if not spec.is_plain:
        return Choice(TiledAttention(spec, biases), f"the reference path, for {', '.join(_options(spec))}")
    return Choice(BlockedAttention(spec), _PLAIN)


def _options(spec: AttentionSpec) -> list[str]:
    """What a plain mask lacks."""
    asked = {
        "the contextual mask": spec.contextual_tokens > 0,
        "max_attn_len": spec.max_attn_len > 0,
        "target groups": spec.target_group_size > 1,
        "relative bias": spec.has_bias,
    }
    return [name for name, is_asked in asked.items() if is_asked]
