"""The back end of each accelerator, and plain torch in its place if the library is missing or broken."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from structlog.testing import capture_logs

from relaygr.worker.device import CpuDevice
from relaygr.worker.kv import KvDtype, KvGeometry
from relaygr.worker.model.attention import rec_sdk
from relaygr.worker.model.attention.choose import accelerated_attention, choose_attention
from relaygr.worker.model.attention.rec_sdk import RecSdkAttention
from relaygr.worker.model.attention.spec import AttentionSpec
from relaygr.worker.model.fused import kv_rounding
from relaygr.worker.model.options import RelativeBias
from relaygr.worker.model.triton import attention as triton_backend
from relaygr.worker.model.triton import launch
from relaygr.worker.model.triton.attention import TritonAttention, warm_up
from tests.worlds.attention import random_biases
from tests.worlds.triton import BLOCKS, DEVICE

SPEC = AttentionSpec(2, 16, 32, 0.25, 37.0)
GEOMETRY = KvGeometry(2, 2, 16, 32, 8, KvDtype.FLOAT32)


class Called(CpuDevice):
    """A device whose torch device has the given name."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        # torch knows the name npu only once torch_npu is imported.
        self.torch_device = cast(torch.device, SimpleNamespace(type=kind))

    @property
    def name(self) -> str:
        return f"{self.torch_device.type}:0"


def nothing(*_: object) -> None:
    """Replaces the warm-up."""


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, "the plain mask on cuda"),
        ({"target_group_size": 3}, "target groups on cuda"),
        ({"contextual_tokens": 2, "max_attn_len": 5}, "the contextual mask, max_attn_len on cuda"),
    ],
)
def test_cuda_gets_triton_for_every_mask(monkeypatch: pytest.MonkeyPatch, options: dict[str, int], reason: str) -> None:
    monkeypatch.setattr(triton_backend, "warm_up", nothing)
    with capture_logs() as logs:
        chosen = choose_attention(replace(SPEC, **options), None, GEOMETRY, Called("cuda"))
    assert isinstance(chosen, TritonAttention)
    assert logs == [
        {
            "event": "attention back end",
            "name": "triton",
            "device": "cuda:0",
            "reason": reason,
            "log_level": "info",
        }
    ]


def test_without_triton_one_warning_and_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "relaygr.worker.model.triton.attention", None)
    with capture_logs() as logs:
        chosen = choose_attention(SPEC, None, GEOMETRY, Called("cuda"))
    assert chosen.name == "blocked torch"
    assert [entry["log_level"] for entry in logs] == ["warning", "info", "warning"]
    assert "idle" in logs[2]["event"]
    assert "model.triton.attention" in logs[0]["error"]


def test_kernels_that_do_not_compile_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("ptxas fatal: no such architecture")

    monkeypatch.setattr(triton_backend, "warm_up", fails)
    with capture_logs() as logs:
        assert accelerated_attention(SPEC, None, GEOMETRY, Called("cuda")) is None
    assert [entry["error"] for entry in logs] == ["RuntimeError('ptxas fatal: no such architecture')"]


def test_a_gpu_without_float8_is_said_to_be_one_and_int8_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "compute_capability", lambda: 80)
    monkeypatch.setattr(triton_backend, "warm_up", nothing)
    for dtype, warned in ((KvDtype.FLOAT8, True), (KvDtype.INT8, False)):
        with capture_logs() as logs:
            attention = accelerated_attention(SPEC, None, replace(GEOMETRY, dtype=dtype), Called("cuda"))
        assert (attention is None, ["worker.kv_dtype=int8" in entry["error"] for entry in logs]) == (
            warned,
            [True] * warned,
        )
    with capture_logs() as logs:
        kv_rounding(KvDtype.FLOAT8, torch.device("cuda", 0))
    assert ["worker.kv_dtype=int8" in entry["error"] for entry in logs] == [True]


def test_soft_max_and_other_devices_have_no_kernels_of_their_own() -> None:
    soft_max = replace(SPEC, normalizer=None)
    with capture_logs() as logs:
        assert accelerated_attention(soft_max, None, GEOMETRY, Called("cuda")) is None
        assert accelerated_attention(SPEC, None, GEOMETRY, CpuDevice()) is None
        assert accelerated_attention(SPEC, None, GEOMETRY, Called("xpu")) is None
        assert accelerated_attention(replace(SPEC, target_group_size=3), None, GEOMETRY, Called("npu")) is None
    assert logs == []
    for spec in (soft_max, replace(SPEC, has_bias=True)):
        with pytest.raises(ValueError, match="need biases exactly"):
            TritonAttention(spec, DEVICE)


def test_an_npu_uses_the_operator_if_it_is_installed_and_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    for is_there, spec, expected in (
        (True, SPEC, RecSdkAttention),
        (False, SPEC, type(None)),
        (True, replace(SPEC, attention_dim=24), type(None)),
    ):
        monkeypatch.setattr(rec_sdk, "load_operators", lambda is_there=is_there: is_there)
        assert type(accelerated_attention(spec, None, GEOMETRY, Called("npu"))) is expected


def test_an_operator_library_that_cannot_be_loaded_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> bool:
        raise OSError("libascendcl.so: cannot open shared object file")

    monkeypatch.setattr(rec_sdk, "load_operators", fails)
    with capture_logs() as logs:
        assert accelerated_attention(SPEC, None, GEOMETRY, Called("npu")) is None
    assert [entry["event"] for entry in logs] == ["no kernels for this device, plain torch instead"]


@pytest.mark.slow
@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
def test_the_warm_up_runs_all_kernels(compute: torch.dtype) -> None:
    bias = RelativeBias(positions=20, time_buckets=9)
    spec = replace(SPEC, compute_dtype=compute, contextual_tokens=2, max_attn_len=9, has_bias=True)
    attention = TritonAttention(spec, DEVICE, random_biases(bias, DEVICE, seed=0), BLOCKS)
    warm_up(attention, spec, GEOMETRY, DEVICE, 64)
