"""A ranker of your own in one file. docs/rankers.md leads from here to the relay, and train.py trains it.

Each behaviour of a history is a token that sees itself and the earlier ones. Each candidate is a token that sees the
whole history and itself: soft-max attention in a few layers, as in OneTrans, without its pyramid and mixed parameters.
"""

from __future__ import annotations

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

from relaygr.ranker import Computed, History, Kv, ModelFolder, Past, Ranker, Shape


class Block(nn.Module):
    """Attention, and an MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor, mask: Tensor, past: Kv | None = None) -> tuple[Tensor, Kv]:
        """Rows [users, rows, width] after this block, and their K,V [users, heads, rows, dim].

        `mask` [rows, past + rows]: the keys that each row sees.
        """
        own = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).movedim(-3, 0).transpose(-3, -2)
        q, k, v = own.unbind(0)
        keys, values = (k, v) if past is None else (torch.cat((past[0], k), -2), torch.cat((past[1], v), -2))
        attended = functional.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
        x = x + self.out(attended.transpose(-3, -2).flatten(-2))
        return x + self.mlp(x), (k, v)


class Net(nn.Module):
    """The model. The sizes are `options` of config.json."""

    def __init__(
        self, items: int, actions: int, layers: int, heads: int, width: int, max_history: int, max_suffix: int
    ) -> None:
        super().__init__()
        self.max_history, self.max_suffix = max_history, max_suffix
        self.register_buffer("item_ids", torch.arange(items))  # In ascending order; a training writes those of its log.
        self.item = nn.Embedding(items + 1, width)  # The last row is for unknown items.
        self.action = nn.Embedding(actions + 1, width)
        self.place = nn.Embedding(max_history + max_suffix, width)
        self.candidate = nn.Parameter(torch.zeros(width))  # In place of action and place.
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 1))
        for table in (self.item, self.action, self.place):
            nn.init.normal_(table.weight, std=0.05)

    def behaviours(self, items: Tensor, actions: Tensor, start: int) -> Tensor:
        """Tokens of behaviours that begin at the place `start` of their history."""
        places = self.place.weight[start : start + items.shape[-1]]
        return self._items(items) + self.action(actions.clamp(max=self.action.num_embeddings - 1)) + places

    def candidates(self, items: Tensor) -> Tensor:
        return self._items(items) + self.candidate

    def _items(self, items: Tensor) -> Tensor:
        at = torch.searchsorted(self.item_ids, items).clamp(max=len(self.item_ids) - 1)
        return self.item(torch.where(self.item_ids[at] == items, at, len(self.item_ids)))

    def forward(self, items: Tensor, actions: Tensor, start: int, candidates: Tensor, seen: Tensor) -> Tensor:
        """Scores [users, candidates] where a candidate sees the first `seen` behaviours: for training."""
        x = torch.cat((self.behaviours(items, actions, start), self.candidates(candidates)), 1)
        history, rows = items.shape[1], x.shape[1]
        mask = torch.eye(rows, dtype=torch.bool).repeat(len(x), 1, 1)
        mask[:, :history, :history] = causal(history, 0, x.device)
        mask[:, history:, :history] = torch.arange(history) < seen[..., None]
        for block in self.blocks:
            x, _ = block(x, mask[:, None])
        return self.head(x[:, history:]).squeeze(-1)


def causal(rows: int, past: int, device: torch.device) -> Tensor:
    """The mask of rows that see all of the past, the earlier rows and themselves."""
    return torch.ones(rows, past + rows, dtype=torch.bool, device=device).tril(past)


class OneTrans(Ranker):
    """What the worker calls, for one user at a time."""

    def __init__(self, folder: ModelFolder) -> None:
        super().__init__(folder)
        self.net = Net(**folder.options)
        self.net.load_state_dict(load_file(folder.path / "model.safetensors"))
        self.net.to(folder.device, folder.dtype).eval()
        self.net.head.float()  # Scores in bfloat16 would have many ties.

    def shape(self) -> Shape:
        net, block = self.net, self.net.blocks[0]
        dim = block.qkv.in_features // block.heads
        return Shape(
            layers=len(net.blocks), heads=block.heads, key_dim=dim, value_dim=dim, num_items=len(net.item_ids),
            num_actions=net.action.num_embeddings - 1, max_history=net.max_history, max_suffix=net.max_suffix,
            max_candidates=512,
        )  # fmt: skip

    def known_items(self) -> list[int]:
        return self.net.item_ids.tolist()

    def prefix(self, history: History, start: int, end: int, past: Past) -> Computed:
        x = self.net.behaviours(history.items[start:end], history.actions[start:end], start)
        return Computed(self._layers(x, causal(end - start, start, x.device), past)[1])

    def rank(self, suffix: History, candidates: Tensor, past: Past, state: Tensor | None) -> Tensor:  # noqa: ARG002
        recent = self.net.behaviours(suffix.items, suffix.actions, past.rows)
        x = torch.cat((recent, self.net.candidates(candidates)))
        mask, behaviours = causal(len(x), past.rows, x.device), len(suffix)
        mask[behaviours:, past.rows + behaviours :] = torch.eye(len(candidates), dtype=torch.bool)
        return self.net.head(self._layers(x, mask, past)[0][behaviours:].float())

    def _layers(self, x: Tensor, mask: Tensor, past: Past) -> tuple[Tensor, list[Kv]]:
        """The rows after all layers, and their K,V. Attention is faster with a dimension for users, here of one."""
        x, layers = x[None], []
        for block, (k, v) in zip(self.net.blocks, past, strict=True):
            x, own = block(x, mask, (k[None], v[None]))
            layers.append((own[0][0], own[1][0]))
        return x[0], layers
