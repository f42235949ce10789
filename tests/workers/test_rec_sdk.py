"""The NPU back end with a fake of RecSDK's operator, which checks its arguments (`fake_rec_sdk.py`)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from relaygr.worker.device import CpuDevice
from relaygr.worker.kv import KvDtype
from relaygr.worker.model.attention import rec_sdk
from relaygr.worker.model.attention.rec_sdk import RecSdkAttention, load_operators
from tests.workers import fake_rec_sdk
from tests.worlds.attention import LAYER, MIXED, SHAPES, TOLERANCES, RaggedForward, SegmentRows


@pytest.fixture(autouse=True, scope="module")
def operator() -> None:
    fake_rec_sdk.register_operator()


def forward_of(runs: list[SegmentRows], **options: object) -> RaggedForward:
    return RaggedForward(runs, **({"dqk": 16, "dv": 32, "device": CpuDevice()} | options))  # type: ignore[arg-type]


def attend(forward: RaggedForward) -> torch.Tensor:
    return (
        RecSdkAttention(forward.spec).begin(forward.kv, forward.segments).attend(LAYER, forward.q, forward.k, forward.v)
    )


@pytest.mark.parametrize("runs", SHAPES.values(), ids=SHAPES.keys())
def test_rows_get_what_the_formula_gives(runs: list[SegmentRows]) -> None:
    forward = forward_of(runs)
    assert forward.error(attend(forward)) <= TOLERANCES[torch.float32]


@pytest.mark.parametrize("compute", TOLERANCES)
def test_any_compute_type(compute: torch.dtype) -> None:
    forward = forward_of(MIXED, compute=compute)
    assert forward.error(attend(forward)) <= TOLERANCES[compute]


def test_chunks_are_stored() -> None:
    forward = forward_of([SegmentRows(9, 14, 0)], page_tokens=5, stored=KvDtype.BFLOAT16)
    attend(forward)
    pages = forward.segments[0].pages
    for row, token in enumerate(range(9, 23)):
        stored = forward.kv.k(LAYER)[int(pages[token // 5]), :, token % 5]
        assert torch.equal(stored, forward.k[row].to(torch.bfloat16))


def test_two_calls_a_layer_whatever_the_segments() -> None:
    fake_rec_sdk.calls.clear()
    attend(forward_of(MIXED))
    assert fake_rec_sdk.calls == [0, 2]


class Sending(CpuDevice):
    """Counts the arrays that are sent to it."""

    sent_arrays = 0

    def sent(self, host: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
        self.sent_arrays += 1
        return super().sent(host, into)


def test_the_description_of_the_segments_is_sent_in_two_arrays() -> None:
    """By the device's `sent`, which does not block."""
    device = Sending()
    forward = forward_of(MIXED, device=device)
    started = RecSdkAttention(forward.spec).begin(forward.kv, forward.segments)
    assert device.sent_arrays == 2
    started.attend(LAYER, forward.q, forward.k, forward.v)
    assert device.sent_arrays == 2


def test_a_forward_too_long_for_the_operator_is_computed_by_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rec_sdk, "MAX_TOKENS", 22)
    fake_rec_sdk.calls.clear()
    forward = forward_of(MIXED)
    assert forward.error(attend(forward)) <= TOLERANCES[torch.float32]
    assert fake_rec_sdk.calls == []


@pytest.mark.parametrize(
    "change",
    [{"num_heads": 17}, {"attention_dim": 24}, {"hidden_dim": 528}, {"max_attn_len": 5}, {"normalizer": None}],
    ids=str,
)
def test_the_operator_is_not_called_for_masks_that_it_does_not_compute(change: dict[str, int]) -> None:
    spec = forward_of(MIXED).spec
    assert RecSdkAttention.fits(spec)
    assert not RecSdkAttention.fits(replace(spec, **change))
    with pytest.raises(ValueError, match="does not support this mask"):
        RecSdkAttention(replace(spec, **change))


def test_the_operator_is_found_where_it_is_registered() -> None:
    assert load_operators()
