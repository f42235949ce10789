"""The options of several commands that load a model, so that each has one name and one text."""

from __future__ import annotations

from typing import Annotated

import typer

from relaygr.worker.kv import DramKvDtype, KvDtype
from relaygr.worker.model.options import ComputeDtype

DeviceOption = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="cpu, cuda, cuda:1, npu.", show_default="the accelerator, else cpu"),
]
KvDtypeOption = Annotated[
    KvDtype | None, typer.Option(help="Element type of K,V on the device.", show_default="that of the device")
]
DramKvDtypeOption = Annotated[DramKvDtype, typer.Option(help="Element type of K,V in the DRAM tier.")]
ComputeDtypeOption = Annotated[
    ComputeDtype | None, typer.Option(help="Element type of matrix products.", show_default="that of the device")
]
RankerModulesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--ranker-module",
        help="Module, or entry point, of a ranker whose code may run; may be repeated.",
        show_default="none",
    ),
]
ThreadsOption = Annotated[int, typer.Option(min=1, help="CPU threads of one operator.")]
