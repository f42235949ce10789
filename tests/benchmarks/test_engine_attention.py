"""The comparison of attention back ends, with a fake of the peer's package: all compute the same."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

from relaygr.bench.engine.attention import (
    BASE,
    META,
    AttentionCase,
    Contest,
    find_peers,
    our_back_ends,
)
from relaygr.worker.device import CpuDevice
from relaygr.worker.kv import KvDtype, KvGeometry
from relaygr.worker.model.attention.choose import choose_attention
from relaygr.worker.model.attention.spec import AttentionSpec

SPEC = AttentionSpec(2, 16, 16, 0.3, 80.0)
GEOMETRY = KvGeometry(1, 2, 16, 16, 64, KvDtype.FLOAT32)


def triton_hstu_mha(
    N: int,  # noqa: N803 - as published
    alpha: float,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seq_offsets: torch.Tensor,
    num_targets: torch.Tensor | None = None,
) -> torch.Tensor:
    """Has the published signature: the rows of q are the last tokens of each sequence."""
    users = seq_offsets.numel() - 1
    rows, length = q.shape[0] // users, k.shape[0] // users
    assert length <= N, "its grid ends there, and rows behind it are left as they are"
    targets = 0 if num_targets is None else int(num_targets[0])
    place = torch.arange(length).clamp(max=length - targets)
    mask = (place[:, None] > place[None, :]) | torch.eye(length, dtype=torch.bool)
    parts = [part.unflatten(0, (users, -1)).transpose(1, 2) for part in (q, k, v)]
    weights = F.silu(parts[0] @ parts[1].transpose(2, 3) * alpha) / N * mask[length - rows :]
    return (weights @ parts[2]).transpose(1, 2).flatten(0, 1)


def triton_cached_hstu_mha(delta_q: torch.Tensor, **others: object) -> torch.Tensor:
    return triton_hstu_mha(q=delta_q, **others)  # type: ignore[arg-type]


@pytest.fixture
def meta(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = META.split(".")
    for end in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(parts[end - 1]))
    kernels = sys.modules[META]
    kernels.triton_hstu_mha = triton_hstu_mha  # type: ignore[attr-defined]
    kernels.triton_cached_hstu_mha = triton_cached_hstu_mha  # type: ignore[attr-defined]


@pytest.mark.parametrize("case", [AttentionCase(3, 70, 0), AttentionCase(2, 65, 9), AttentionCase(1, 1, 1)])
def test_all_contenders_compute_the_same(case: AttentionCase, meta: None) -> None:
    contest = Contest(case, SPEC, KvDtype.FLOAT32, CpuDevice())
    theirs = find_peers()["Meta, Triton"](contest.jagged)().flatten()
    back_ends = our_back_ends(SPEC, GEOMETRY, CpuDevice())
    chosen = choose_attention(SPEC, None, GEOMETRY, CpuDevice())
    assert chosen.name in {back_end.name for back_end in back_ends.values()}, "that of a worker is one of them"
    for back_end in back_ends.values():
        ours = contest.ours(back_end)().flatten()
        assert float((ours - theirs).abs().max() / theirs.abs().max()) < 2e-6


@pytest.mark.slow
def test_candidates_beside_a_chunk_get_the_same_from_the_kernels() -> None:
    from tests.worlds.triton import DEVICE, choose_triton

    case = AttentionCase(1, 65, 9, beside=20)
    contest = Contest(case, SPEC, KvDtype.FLOAT32, DEVICE)
    expected = contest.ours(our_back_ends(SPEC, GEOMETRY, CpuDevice())[BASE])()
    assert expected.shape[0] == case.rows == 29
    ours = contest.ours(choose_triton(SPEC, None, GEOMETRY, DEVICE))()
    assert float((ours - expected).abs().max() / expected.abs().max()) < 2e-6


def test_an_n_below_the_length_is_refused_since_peers_would_skip_rows() -> None:
    with pytest.raises(ValueError, match=r"N = 80.0 is less than the 81 tokens"):
        Contest(AttentionCase(1, 80, 1), SPEC, KvDtype.FLOAT32, CpuDevice())


def test_without_their_packages_there_are_no_peers() -> None:
    assert find_peers() == {}
