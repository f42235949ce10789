"""Layers of three sources to ours (docs/convert.md, "Layers")."""

from __future__ import annotations

import re

import torch

from relaygr.runtime.errors import RelayError
from relaygr.worker.model.convert.options import ProjectionLayout
from relaygr.worker.model.convert.takings import AS_IS, TRANSPOSED, Takings, Transform, both


def number_of_layers(takings: Takings, prefix: str) -> int:
    """How many layers are named PREFIX0., PREFIX1., ... Raises RelayError if there is none or a gap."""
    pattern = re.compile(re.escape(prefix) + r"(\d+)\.")
    found = {int(match[1]) for name in takings.names() if (match := pattern.match(name))}
    if not found:
        raise RelayError(f"The source has no layers: no tensor's name begins with {prefix}0.")
    if found != set(range(len(found))):
        raise RelayError(f"The source's layers {sorted(found)} do not count from 0 without a gap.")
    return len(found)


def contiguous_columns(heads: int, attention_dim: int, hidden_dim: int) -> Transform:
    """Per-head columns [U V Q K of head 0, U V Q K of head 1, ...] (the last dimension) to blocks U, V, Q, K."""
    sizes = (hidden_dim, hidden_dim, attention_dim, attention_dim)
    width = sum(sizes)
    columns = torch.arange(heads * width).view(heads, width)
    order = torch.cat([part.flatten() for part in torch.split(columns, list(sizes), dim=1)])
    return Transform("heads put together, U then V, Q and K", lambda x: x[..., order])


def take_norm(takings: Takings, target: str, weights: tuple[str, ...], biases: tuple[str, ...], width: int) -> None:
    """A norm's weight and bias; where the source has neither, it is a norm without them."""
    if not any(takings.has(name) for name in (*weights, *biases)):
        takings.give([], f"{target}.weight", torch.ones(width), "ones: the source's norm has no weight")
        takings.give([], f"{target}.bias", torch.zeros(width), "zeros: the source's norm has no bias")
        return
    takings.take_first(weights, f"{target}.weight")
    takings.take_first(biases, f"{target}.bias")


def take_projection(
    takings: Takings, layer: str, weights: tuple[str, str], biases: tuple[str, ...], columns: Transform
) -> None:
    """The joint projection. weights: its name as [in, out], its name as [out, in]; columns: their new order."""
    rows_first, columns_first = weights
    target = f"{layer}.projection"
    if takings.has(columns_first) and not takings.has(rows_first):
        takings.take(columns_first, f"{target}.weight", both(TRANSPOSED, columns))
    else:
        takings.take(rows_first, f"{target}.weight", columns)
    takings.take_first(biases, f"{target}.bias", columns)


def order_of(layout: ProjectionLayout, heads: int, attention_dim: int, hidden_dim: int) -> Transform:
    """What brings the columns of a projection into our order."""
    if layout is ProjectionLayout.CONTIGUOUS:
        return AS_IS
    return contiguous_columns(heads, attention_dim, hidden_dim)


def per_head(width: int, heads: int, what: str) -> int:
    """Width of one head. Raises RelayError if heads do not divide it."""
    if width <= 0 or width % heads:
        raise RelayError(f"{what} is {width} wide, which {heads} heads do not divide: check --heads.")
    return width // heads
