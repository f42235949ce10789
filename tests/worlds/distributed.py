"""Checkpoint folders as training loops save them, written by torch's own writers for several ranks in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter, metadata, planner

Tensors = dict[str, torch.Tensor]


class RankShards(torch.Tensor):
    """The rows of a table that one rank holds, as torch's planner asks for them."""

    whole: torch.Tensor
    start: int
    end: int

    @classmethod
    def of(cls, whole: torch.Tensor, start: int, end: int) -> RankShards:
        shards = torch.Tensor._make_subclass(cls, torch.empty(0))  # type: ignore[no-untyped-call]
        assert isinstance(shards, RankShards)
        shards.whole, shards.start, shards.end = whole, start, end
        return shards

    def __create_write_items__(self, fqn: str, obj: Any) -> list[planner.WriteItem]:
        offsets = torch.Size([self.start, 0])
        return [
            planner.WriteItem(
                index=metadata.MetadataIndex(fqn, offsets),
                type=planner.WriteItemType.SHARD,
                tensor_data=planner.TensorWriteData(
                    chunk=metadata.ChunkStorageMetadata(
                        offsets, torch.Size([self.end - self.start, self.whole.shape[1]])
                    ),
                    properties=metadata.TensorProperties.create_from_tensor(self.whole),
                    size=self.whole.size(),
                ),
            )
        ]

    def __get_tensor_shard__(self, index: metadata.MetadataIndex) -> torch.Tensor:
        return self.whole[self.start : self.end].clone()


def save_distributed(folder: Path, tables: Tensors, others: dict[str, Any], ranks: int) -> None:
    """A folder as `torch.distributed.checkpoint.save` writes it: the rows of each table over the ranks."""
    writer = FileSystemWriter(folder)
    planners, plans = [], []
    for rank in range(ranks):
        state: dict[str, Any] = dict(others) if rank == 0 else {}
        for name, table in tables.items():
            cuts = [len(table) * at // ranks for at in range(ranks + 1)]
            state[name] = RankShards.of(table, cuts[rank], cuts[rank + 1])
        own = DefaultSavePlanner()
        own.set_up_planner(state, writer.storage_meta(), is_coordinator=rank == 0)
        if rank == 0:
            writer.set_up_storage_writer(is_coordinator=True)
        planners.append(own)
        plans.append(writer.prepare_local_plan(own.create_local_plan()))
    plans, index = planners[0].create_global_plan(plans)
    plans = writer.prepare_global_plan(plans)
    results = [writer.write_data(own.finish_plan(plan), own).wait() for own, plan in zip(planners, plans, strict=True)]
    writer.finish(index, results)


def save_dynamic_table(folder: Path, table: str, keys: torch.Tensor, rows: torch.Tensor, ranks: int) -> None:
    """The files of NVIDIA's dynamicemb: row-wise over the ranks by key, in the order of a hash table."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(ranks):
        own = keys % ranks == rank
        for item, array in (("keys", keys[own]), ("values", rows[own]), ("scores", keys[own])):
            (folder / f"{table}_emb_{item}.rank_{rank}.world_size_{ranks}").write_bytes(array.numpy().tobytes())
    (folder / f"{table}_opt_args.json").write_text("{}")
