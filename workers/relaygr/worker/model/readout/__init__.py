"""From a candidate's last row to one score a task (docs/model.md).

    row     = norm(row)                                      or  norm(linear([row, where in each period the query is]))
    score   = MLP(row)                                       or  MLP(row * MLP(candidate's item and its features))

then sigmoid where a task is binary. Sources: NVIDIA's recsys-examples (L2 norm, MLP), Meta's DLRM-v3 (the rest).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from relaygr.worker.model.config import ModelConfig
from relaygr.worker.model.inputs.content import ItemEmbeddings
from relaygr.worker.model.inputs.tokens import Column
from relaygr.worker.model.mlp import swish_norm_mlp
from relaygr.worker.model.options import ReadoutForm
from relaygr.worker.model.readout.rows import build_row_reader
from relaygr.worker.model.readout.tasks import TaskHead

__all__ = ["Readout"]


class Readout:
    """Rows and tokens of candidates to scores."""

    def __init__(self, config: ModelConfig, tensors: Mapping[str, torch.Tensor]) -> None:
        self._read = build_row_reader(config, tensors)
        self._head = TaskHead(config, tensors)
        self._score = self._of_rows
        if config.readout is ReadoutForm.ITEM_PRODUCT and config.dlrm_inputs is not None:
            self._items = ItemEmbeddings(len(config.dlrm_inputs.item_features), tensors)
            eps = config.readout_mlp_eps
            self._item_mlp = swish_norm_mlp(tensors, "readout.item", eps, config.swish_eps(eps))
            self._score = self._of_products

    def __call__(self, rows: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """rows [candidates, D], their tokens int64 [candidates, 5] -> scores float32 [candidates, tasks]."""
        return self._score(rows, tokens)

    def user_rows(self, rows: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """[candidates, D]: the rows as the task MLP or the product reads them."""
        return self._read(rows, tokens[:, Column.TIME])

    def item_rows(self, tokens: torch.Tensor) -> torch.Tensor:
        """[candidates, D]: the candidates' own side of the product."""
        return self._item_mlp(self._items(tokens[:, Column.CONTENT]))

    def _of_rows(self, rows: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return self._head(self.user_rows(rows, tokens))

    def _of_products(self, rows: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return self._head(self.user_rows(rows, tokens) * self.item_rows(tokens))
