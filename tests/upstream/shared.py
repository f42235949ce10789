"""Shared by the scripts of this folder: processes of a training job, the page's snippets, stand-ins for packages."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import re
import shutil
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "checkpoints.md"
SNIPPET = re.compile(r"^```python (\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def page_names() -> dict[str, Any]:
    """The functions of docs/checkpoints.md, which record requests and their scores."""
    names: dict[str, Any] = {}
    for _, snippet in SNIPPET.findall(PAGE.read_text(encoding="utf-8")):
        exec(snippet, names)
    return names


def make_folder(name: str, make: Callable[[int], None], ranks: int) -> None:
    """Makes a folder anew: make(rank) runs in so many processes. The first argument is the checkout of the source."""
    shutil.rmtree(HERE / name, ignore_errors=True)
    (HERE / name).mkdir()
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="29617")
    torch.multiprocessing.spawn(_run, args=(ranks, HERE / name, make, str(Path(sys.argv[1]).resolve())), nprocs=ranks)


def _run(rank: int, ranks: int, folder: Path, make: Callable[[int], None], checkout: str) -> None:
    for prefix in ("", "LOCAL_"):
        os.environ.update({f"{prefix}RANK": str(rank), f"{prefix}WORLD_SIZE": str(ranks)})
    # A distributed checkpoint stores the path at which it was written.
    os.chdir(folder)
    sys.path.insert(0, checkout)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=ranks)
    make(rank)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def shard(model: torch.nn.Module, tables: Sequence[str]) -> torch.nn.Module:
    """The model with the rows of these tables over all ranks, as torchrec trains it."""
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
    from torchrec.distributed.planner.types import ParameterConstraints
    from torchrec.distributed.sharding_plan import get_default_sharders

    ranks = torch.distributed.get_world_size()
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=ranks, local_world_size=ranks, compute_device="cpu"),
        constraints={table: ParameterConstraints(sharding_types=["row_wise"]) for table in tables},
    )
    sharders = get_default_sharders()
    plan = planner.collective_plan(model, sharders, torch.distributed.GroupMember.WORLD)
    return DistributedModelParallel(model, device=torch.device("cpu"), plan=plan, sharders=sharders)


class StandIn(type):
    """A class that has every attribute, and whose objects do nothing."""

    def __getattr__(cls, name: str) -> StandIn:
        return _stand_in(name)


def _stand_in(name: str) -> StandIn:
    if name.startswith("__"):
        raise AttributeError(name)
    return StandIn(name, (), {"__init__": lambda *_, **__: None})


class StandInModule(types.ModuleType):
    """A module that has every attribute."""

    __path__: Sequence[str] = ()

    def __getattr__(self, name: str) -> StandIn:
        return _stand_in(name)


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, packages: Sequence[str]) -> None:
        self._packages = packages

    def find_spec(self, fullname: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in self._packages:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return StandInModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def stand_in(*packages: str) -> None:
    """Lets these packages be imported, though they are not installed. They compute nothing."""
    sys.meta_path.insert(0, Finder(packages))


def stand_in_module(name: str, **members: object) -> None:
    """Lets a module be imported with these members in place of its own."""
    module = StandInModule(name)
    vars(module).update(members)
    sys.modules[name] = module
