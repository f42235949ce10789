"""The models and back ends for which the engine's contract is tested (`test_engine_contract.py`).

A kind is a small configuration that represents one design of rankers; a back end computes attention. A
new back end is added to `BACKENDS`, and then runs all these tests.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from importlib.util import find_spec

import torch

from relaygr.worker.device import CpuDevice, Device
from relaygr.worker.kv import KvGeometry
from relaygr.worker.model.attention.bias import RelativeBiases
from relaygr.worker.model.attention.blocked import BlockedAttention
from relaygr.worker.model.attention.choose import AttentionChooser, choose_attention
from relaygr.worker.model.attention.spec import AttentionSpec
from relaygr.worker.model.attention.tiled import TiledAttention
from relaygr.worker.model.compiled.attention import CompiledAttention
from relaygr.worker.model.compiled.form import NARROW_BLOCKS, WIDE_BLOCKS, Block, blocks_of_processor
from relaygr.worker.model.config import ModelConfig
from relaygr.worker.model.inputs.tables import DEVICE_TABLE_BYTES
from relaygr.worker.model.options import (
    Activated,
    ContextualFeature,
    DlrmInputs,
    Family,
    InputForm,
    ItemFeature,
    OutputForm,
    PositionOrigin,
    ReadoutActivation,
    ReadoutForm,
    ReadoutNorm,
    RelativeBias,
    TimeEncoding,
    TimePeriod,
)
from tests.worlds.model import small_config

_FEATURES = (ContextualFeature(name="country", cardinality=3), ContextualFeature(name="tags", cardinality=5, tokens=2))
_RESEARCH = {
    "norm_affine": False,
    "attn_alpha": 1.0,
    "activated": Activated.UVQK,
    "output_form": OutputForm.UNORM,
    "projection_bias": False,
    "output_bias": True,
    "num_positions": 0,
}
_FROM_END = {
    "position_origin": PositionOrigin.END,
    "num_positions": 60,
    "time_encoding": TimeEncoding.SQRT,
    "num_times": 40,
    "embedding_scale": 4.0,
}

HAS_ONEDNN = bool(torch._C._has_mkldnn)
KINDS: dict[str, ModelConfig] = {
    "meta": small_config(contextual_features=_FEATURES),
    # Machine code needs dimensions of V that are multiples of 16, in bfloat16 those of K, too.
    "meta, wide heads": small_config(contextual_features=_FEATURES, attention_dim=16, hidden_dim=16),
    "meta with group norm": small_config(group_norm=True),
    "nvidia": small_config(
        inputs=InputForm.INTERLEAVED,
        activated=Activated.UVQK,
        output_form=OutputForm.UNORM,
        norm_eps=1e-5,
        readout_norm=ReadoutNorm.L2,
        contextual_features=_FEATURES,
        target_group_size=3,
    ),
    "research": small_config(**_RESEARCH, relative_bias=RelativeBias(positions=64, time_buckets=128)),
    "research, concatenated, bias by position": small_config(
        **(_RESEARCH | {"output_form": OutputForm.U_NA_UNORM}), relative_bias=RelativeBias(positions=20)
    ),
    "research, cosine": small_config(
        activated=Activated.UVQK,
        output_form=OutputForm.UNORM,
        relative_bias=RelativeBias(positions=64),
        readout=ReadoutForm.ITEM_PRODUCT,
        readout_norm=ReadoutNorm.L2,
        readout_hidden=(),
    ),
    "soft-max": small_config(family=Family.SOFTMAX, mlp_dim=24, contextual_features=_FEATURES, output_bias=True),
    "soft-max with every mask option": small_config(
        family=Family.SOFTMAX,
        mlp_dim=24,
        contextual_features=_FEATURES,
        contextual_mask=True,
        max_attn_len=9,
        min_full_attn_len=4,
        target_group_size=3,
        relative_bias=RelativeBias(positions=30, time_buckets=16, log_base=1.0),
        readout_hidden_norm=True,
    ),
    "windowed": small_config(max_attn_len=7, contextual_features=_FEATURES),
    "windowed, the newest rows see all": small_config(max_attn_len=7, min_full_attn_len=5),
    "contextual mask": small_config(contextual_mask=True, contextual_features=_FEATURES),
    "contextual mask and window": small_config(
        contextual_mask=True, contextual_features=_FEATURES, max_attn_len=6, min_full_attn_len=3
    ),
    "positions from the end": small_config(**_FROM_END, contextual_features=_FEATURES),
    "times from the query": small_config(
        time_encoding=TimeEncoding.LOG, num_times=12, time_unit_seconds=600.0, contextual_features=_FEATURES
    ),
    "groups": small_config(target_group_size=4),
    "interleaved with bias by time": small_config(
        inputs=InputForm.INTERLEAVED, relative_bias=RelativeBias(positions=200, time_buckets=20, log_base=0.7)
    ),
    "dlrm-v3": small_config(
        **_FROM_END,
        inputs=InputForm.DLRM,
        num_actions=0,
        dlrm_inputs=DlrmInputs(
            table_dim=6,
            hidden=10,
            item_features=(ItemFeature(name="category", cardinality=7),),
            action_weights=(1, 2, 4),
            action_dim=3,
        ),
        contextual_features=(*_FEATURES, ContextualFeature(name="user", cardinality=9, min_tokens=14)),
        readout=ReadoutForm.ITEM_PRODUCT,
        readout_periods=(TimePeriod(unit_seconds=3600, units=24), TimePeriod(unit_seconds=86_400, units=7)),
        readout_activation=ReadoutActivation.SWISH_NORM,
        swish_norm_eps=1e-3,
    ),
}


@dataclass(frozen=True, slots=True)
class Backend:
    """One way to compute attention, on one device."""

    device: Callable[[], Device]
    choose: AttentionChooser
    computes: Callable[[AttentionSpec], bool]
    """Whether a model is one of its own; others are not run on it."""
    is_slow: bool = False
    """Interpreted: what takes many tiles is left to the slow tests."""
    kinds: Collection[str] = tuple(KINDS)
    """Those of its own that are worth the time."""
    device_table_bytes: int = DEVICE_TABLE_BYTES
    page_tokens: int = 8
    """Where a test does not choose."""


def _tiled(spec: AttentionSpec, biases: RelativeBiases | None, geometry: KvGeometry, device: Device) -> TiledAttention:
    return TiledAttention(spec, biases)


def _blocked(onednn_work: float) -> AttentionChooser:
    def choose(
        spec: AttentionSpec, biases: RelativeBiases | None, geometry: KvGeometry, device: Device
    ) -> BlockedAttention:
        return BlockedAttention(spec, onednn_work)

    return choose


def _in_machine_code(blocks: tuple[Block, ...]) -> AttentionChooser:
    def choose(
        spec: AttentionSpec, biases: RelativeBiases | None, geometry: KvGeometry, device: Device
    ) -> BlockedAttention:
        fits = CompiledAttention.fits(geometry)
        return BlockedAttention(spec, compiled=CompiledAttention(geometry, blocks) if fits else None)

    return choose


BACKENDS: dict[str, Backend] = {
    "as chosen on the CPU": Backend(CpuDevice, choose_attention, lambda _: True),
    "tiled, where blocked is chosen": Backend(CpuDevice, _tiled, lambda spec: spec.is_plain),
    "tables in host memory": Backend(
        CpuDevice, choose_attention, lambda _: True, kinds=("meta", "nvidia", "dlrm-v3"), device_table_bytes=0
    ),
    # The models are small: as chosen, torch computes all their products.
    "blocked, products by oneDNN": Backend(
        CpuDevice, _blocked(1), lambda spec: spec.is_plain and HAS_ONEDNN, kinds=("meta",)
    ),
}
HAS_MACHINE_CODE = find_spec("llvmlite") is not None and blocks_of_processor() is not None
if HAS_MACHINE_CODE:
    # The form for AVX-512 runs on AVX2, too, only slower.
    BACKENDS |= {
        f"blocked, context in machine code for {name}": Backend(
            CpuDevice,
            _in_machine_code(blocks),
            lambda spec: spec.is_plain,
            kinds=("meta, wide heads",),
            page_tokens=16,
        )
        for name, blocks in (("AVX-512", WIDE_BLOCKS), ("AVX2", NARROW_BLOCKS))
    }
if find_spec("triton") is not None:
    # Triton is there for Linux only.
    from tests.worlds.triton import DEVICE, INTERPRETED, choose_triton

    # Under the interpreter one kind takes a minute. test_triton_attention.py covers the masks and biases of the others.
    BACKENDS["triton, interpreted or on a GPU"] = Backend(
        lambda: DEVICE,
        choose_triton,
        lambda spec: spec.normalizer is not None,
        INTERPRETED,
        ("meta",) if INTERPRETED else tuple(KINDS),
    )
