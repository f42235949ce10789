"""SASRec as RecBole trains it, as a ranker. `relaygr model convert-recbole` makes its folder from a checkpoint.

A row is a behaviour: its item and its place, counted from the start of the list. The score of an item is its product
with the last row, which is the state. RecBole pads lists at their end and hides the padding, so nothing is padded here.

There are as many places as RecBole's longest list has items, for prefix and suffix together. Once a history is longer,
the worker leaves out the oldest behaviours, every other one gets another place, and no K,V can be used again.

The folder: `config.json` names this class and the sizes; `model.safetensors` has RecBole's tensors by their names, but
with the rows of `item_embedding.weight` in the order of `item_ids` (int64, rising), and the row of padding last.
Unknown items share that row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

from relaygr.ranker.interface import Computed, History, Kv, ModelFolder, Past, Ranker, Shape
from relaygr.runtime.files import require_regular

WEIGHTS_FILE: Final = "model.safetensors"
ITEM_IDS: Final = "item_ids"
ITEM_TABLE: Final = "item_embedding.weight"
ACTIVATIONS: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "gelu": functional.gelu,
    "relu": functional.relu,
    "swish": functional.silu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
}
"""By RecBole's names."""


class SasRec(Ranker):
    """Options: `items`, `places`, `layers`, `heads`, `width`, `inner`, `activation` and `eps`, as RecBole trained it;
    `max_suffix` of the places, and `max_candidates`.
    """

    version = "1"

    def __init__(self, folder: ModelFolder) -> None:
        """Raises OSError, ValueError if options do not fit, and RuntimeError for other tensors."""
        super().__init__(folder)
        sizes = dict(folder.options)
        self._max_suffix, self._max_candidates = sizes.pop("max_suffix"), sizes.pop("max_candidates")
        # The library would wait for the writer of a pipe.
        require_regular(folder.path / WEIGHTS_FILE)
        tensors = load_file(folder.path / WEIGHTS_FILE)
        self._ids: Tensor = tensors.pop(ITEM_IDS).to(folder.device)
        with torch.device("meta"):
            self._net = Net(**sizes)
        self._net.load_state_dict(tensors, assign=True)
        self._net.to(folder.device, folder.dtype).eval()
        if self._max_suffix >= self._net.places:
            raise ValueError(f"max_suffix {self._max_suffix} leaves no history: it has {self._net.places} places")

    def shape(self) -> Shape:
        net = self._net
        return Shape(
            layers=net.layers,
            heads=net.heads,
            key_dim=net.width // net.heads,
            value_dim=net.width // net.heads,
            num_items=len(self._ids),
            max_history=net.places - self._max_suffix,
            max_candidates=self._max_candidates,
            max_suffix=self._max_suffix,
            state_dim=net.width,
        )

    def known_items(self) -> Sequence[int]:
        ids: list[int] = self._ids.tolist()
        return ids

    def prefix(self, history: History, start: int, end: int, past: Past) -> Computed:
        rows, layers = self._net(self._rows_of(history.items[start:end]), start, past)
        return Computed(layers, rows)

    def rank(self, suffix: History, candidates: Tensor, past: Past, state: Tensor | None) -> Tensor:
        if len(suffix):
            state = self._net(self._rows_of(suffix.items), past.rows, past)[0][-1]
        if state is None:
            # RecBole has no lists without items.
            return torch.zeros(len(candidates), 1, device=candidates.device)
        # Scores in bfloat16 would have many ties.
        wanted: Tensor = self._net.item_embedding(self._rows_of(candidates)).float()
        return (wanted @ state.float())[:, None]

    def _rows_of(self, items: Tensor) -> Tensor:
        """Rows of the item table."""
        unknown = len(self._ids)
        rows = torch.searchsorted(self._ids, items).clamp(max=unknown - 1)
        return torch.where(self._ids[rows] == items, rows, unknown)


class Net(nn.Module):
    """The module of one list, with the names of RecBole's tensors."""

    def __init__(
        self, items: int, places: int, layers: int, heads: int, width: int, inner: int, activation: str, eps: float
    ) -> None:
        """`items`: with the row of padding. Raises ValueError for sizes that do not fit."""
        super().__init__()
        if width % heads:
            raise ValueError(f"{width} numbers do not divide into {heads} heads")
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation {activation} is none of {', '.join(ACTIVATIONS)}")
        self.places, self.layers, self.heads, self.width = places, layers, heads, width
        self.item_embedding = nn.Embedding(items, width)
        self.position_embedding = nn.Embedding(places, width)
        self.LayerNorm = nn.LayerNorm(width, eps)
        self._stack = [_Layer(heads, width, inner, activation, eps) for _ in range(layers)]
        self.trm_encoder = nn.ModuleDict({"layer": nn.ModuleList(self._stack)})

    def forward(self, items: Tensor, start: int, past: Iterable[Kv]) -> tuple[Tensor, list[Kv]]:
        """The rows [rows, width] of `items` (rows of the table) after all layers, and their K,V. `start`: the place of
        the first, and the number of rows in `past`.
        """
        places = torch.arange(start, start + len(items), device=items.device)
        x = self.LayerNorm(self.item_embedding(items) + self.position_embedding(places))
        mask = torch.ones(len(items), start + len(items), dtype=torch.bool, device=x.device).tril(start)
        kept = []
        for layer, known in zip(self._stack, past, strict=True):
            x, own = layer(x, mask, known)
            kept.append(own)
        return x, kept


class _Layer(nn.Module):
    """Attention, then a layer for each row; norms come after the sums."""

    def __init__(self, heads: int, width: int, inner: int, activation: str, eps: float) -> None:
        super().__init__()
        self._heads, self._activate = heads, ACTIVATIONS[activation]
        linear = {name: nn.Linear(width, width) for name in ("query", "key", "value", "dense")}
        self.multi_head_attention = nn.ModuleDict({**linear, "LayerNorm": nn.LayerNorm(width, eps)})
        self.feed_forward = nn.ModuleDict(
            {
                "dense_1": nn.Linear(width, inner),
                "dense_2": nn.Linear(inner, width),
                "LayerNorm": nn.LayerNorm(width, eps),
            }
        )

    def forward(self, x: Tensor, mask: Tensor, past: Kv) -> tuple[Tensor, Kv]:
        attention, feed = self.multi_head_attention, self.feed_forward
        q, k, v = (
            attention[name](x).unflatten(1, (self._heads, -1)).transpose(0, 1) for name in ("query", "key", "value")
        )
        keys, values = torch.cat((past[0], k), 1), torch.cat((past[1], v), 1)
        seen = functional.scaled_dot_product_attention(q, keys, values, mask)
        x = attention["LayerNorm"](attention["dense"](seen.transpose(0, 1).flatten(1)) + x)
        return feed["LayerNorm"](feed["dense_2"](self._activate(feed["dense_1"](x))) + x), (k, v)
