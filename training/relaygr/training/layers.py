"""The parts of the ranker in plain torch, differentiable, for any leading dimensions.

They compute what the worker's engine computes for the one form of `ranker.ranker_config`: a token is item and action,
SiLU is on U, V, Q and K, the output projection reads U * norm(A), and a score reads the product of the candidate's
row and its item's embedding. A test compares them with the engine.

Rows of tables are read by `F.embedding`: the gradient of an index adds up in another order at each run on several
threads, and then the same seed would not give the same checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

from relaygr.worker.model.config import ModelConfig

Tensors = dict[str, torch.Tensor]
Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""rows @ weight"""
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""q, k [..., rows, H * dqk], v [..., rows, H * dv] -> [..., rows, H, dv]"""


def behaviour_rows(config: ModelConfig, tensors: Tensors, items: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
    """int64 [..., behaviours]: rows of the item table, and action codes -> [..., behaviours, D]."""
    rows = F.embedding(items, tensors["items.weight"])
    if not config.num_actions:
        return rows
    return rows + F.embedding(actions.clamp(max=config.num_actions), tensors["actions.weight"])


def candidate_rows(config: ModelConfig, tensors: Tensors, items: torch.Tensor) -> torch.Tensor:
    """int64 [..., candidates]: rows of the item table -> [..., candidates, D], with the action of all candidates."""
    rows = F.embedding(items, tensors["items.weight"])
    return rows + tensors["actions.weight"][config.num_actions + 1] if config.num_actions else rows


def layer(config: ModelConfig, tensors: Tensors, x: torch.Tensor, attend: Attend, product: Product) -> torch.Tensor:
    """One HSTU layer; `tensors` are its own (`layer_tensors`), and `attend` decides what a row sees."""
    z = product(normalised(config, tensors, "input_norm", x), tensors["projection.weight"]) + tensors["projection.bias"]
    z = F.silu(z)
    width, key_width = config.num_heads * config.hidden_dim, config.num_heads * config.attention_dim
    u, v, q, k = torch.split(z, [width, width, key_width, key_width], dim=-1)
    a = attend(q, k, v).flatten(-2)
    gated = u * normalised(config, tensors, "output_norm", a)
    return x + product(gated, tensors["output.weight"])


def task_logits(tensors: Tensors, x: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
    """The candidates' last rows [..., candidates, D] and their rows of the item table -> [..., candidates, tasks]."""
    own = F.embedding(items, tensors["items.weight"])
    product = F.normalize(x, dim=-1) * F.normalize(own, dim=-1)
    return product @ tensors["readout.mlp.0.weight"] + tensors["readout.mlp.0.bias"]


def normalised(config: ModelConfig, tensors: Tensors, name: str, x: torch.Tensor) -> torch.Tensor:
    """The layer norm of this name, over the last dimension."""
    return F.layer_norm(x, x.shape[-1:], tensors[f"{name}.weight"], tensors[f"{name}.bias"], config.norm_eps)


def by_head(x: torch.Tensor, heads: int) -> torch.Tensor:
    """[..., rows, H * dim] -> [..., H, rows, dim]"""
    return x.reshape(*x.shape[:-1], heads, -1).transpose(-3, -2)


def layer_tensors(tensors: Tensors, index: int) -> Tensors:
    """The tensors of one layer, by their names without its prefix."""
    prefix = f"layers.{index}."
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
