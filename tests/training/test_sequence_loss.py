"""The loss of retrieval is torch's cross-entropy of the cosines, with its gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

from relaygr.training import sequence_loss
from relaygr.training.sequence_loss import TEMPERATURE, cosines, retrieval_loss


def made(rows: int, items: int, dim: int = 8) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, dim, generator=generator).requires_grad_(True)
    table = torch.randn(items, dim, generator=generator).requires_grad_(True)
    return x, table, torch.randint(items, (rows,), generator=generator)


def plain(x: torch.Tensor, table: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(F.normalize(x, dim=-1) @ F.normalize(table, dim=-1).T / TEMPERATURE, wanted)


@pytest.mark.parametrize("rows", [1, 128, 129, 400])
def test_the_loss_and_its_gradients_are_those_of_a_plain_soft_max(rows: int) -> None:
    x, table, wanted = made(rows, 50)
    losses, gradients = [], []
    for loss in (plain, retrieval_loss):
        x.grad = table.grad = None
        found = 3 * loss(x, table, wanted)
        found.backward()  # type: ignore[no-untyped-call]
        losses.append(found.item())
        gradients.append((x.grad, table.grad))
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    for ours, theirs in zip(gradients[1], gradients[0], strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-6)


def test_of_a_large_vocabulary_a_sample_estimates_the_same_loss_and_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    x, table, wanted = made(40, 300)
    plain(x, table, wanted).backward()  # type: ignore[no-untyped-call]
    whole, expected = plain(x, table, wanted).item(), (x.grad.clone(), table.grad.clone())
    monkeypatch.setattr(sequence_loss, "MOST_ITEMS", 299)
    # So many that the logarithm of their sum is nearly that of all, however few of them decide it.
    monkeypatch.setattr(sequence_loss, "SAMPLED", 3000)
    x.grad = table.grad = None
    torch.manual_seed(0)
    losses = []
    for _ in range(30):
        loss = retrieval_loss(x, table, wanted)
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(loss.item())
    assert len(set(losses)) == 30
    assert sum(losses) / 30 == pytest.approx(whole, rel=0.01)
    for ours, theirs in zip((x.grad / 30, table.grad / 30), expected, strict=True):
        assert (ours - theirs).norm() < 0.1 * theirs.norm()


@pytest.mark.parametrize("most_items", [5, 50], ids=["a sample", "all items"])
def test_the_gradient_is_the_derivative(most_items: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequence_loss, "MOST_ITEMS", most_items)
    monkeypatch.setattr(sequence_loss, "SAMPLED", 7)
    x, table, wanted = made(6, 9, dim=4)

    def loss(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(1)
        return retrieval_loss(x, table, wanted)

    doubles = (each.detach().double().requires_grad_(True) for each in (x, table))
    assert torch.autograd.gradcheck(loss, tuple(doubles))


def test_without_rows_nothing_is_lost() -> None:
    _, table, wanted = made(1, 5)
    assert retrieval_loss(torch.zeros(0, 8), table, wanted[:0]).item() == 0.0


def test_the_cosine_of_a_row_with_itself_is_one() -> None:
    _, table, _ = made(1, 5)
    found = cosines(3 * table[2], table)
    assert found[2].item() == pytest.approx(1.0) and int(found.argmax()) == 2
