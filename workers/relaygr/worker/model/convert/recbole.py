"""Reads a checkpoint of RecBole's SASRec without RecBole, and writes it as the folder of a ranker (`ranker.sasrec`).

Beside the tensors a checkpoint pickles the object of its configuration, in a protocol that torch does not read without
running code. Nothing is called here: the configuration is a dict, a tensor is a place in the file until it is read, and
any other object is `Inert`. The configuration also says how RecBole numbered the items of its log
(`ingest.recbole`).
"""

from __future__ import annotations

import io
import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Final

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors.torch import save

from relaygr.ranker.sasrec import ITEM_IDS, ITEM_TABLE, WEIGHTS_FILE, Net, SasRec
from relaygr.runtime.errors import RelayError
from relaygr.runtime.files import open_regular, write_whole
from relaygr.worker.model.config import CONFIG_FILE, describe_problems
from relaygr.worker.model.convert.pickles import PICKLE, Inert, InertUnpickler, open_archive

_MODEL: Final = "SASRec"
_LAYER: Final = "trm_encoder.layer.{}.multi_head_attention.query.weight"
_INNER: Final = "trm_encoder.layer.0.feed_forward.dense_1.weight"
_PLACES: Final = "position_embedding.weight"


class RecBoleConfig(BaseModel):
    """What is used of the configuration of a checkpoint: what tensors do not tell, and what numbers the items."""

    model_config = ConfigDict(frozen=True)

    n_heads: int = Field(ge=1)
    hidden_act: str
    layer_norm_eps: float = Field(ge=0, lt=1)
    user_field: str = Field(alias="USER_ID_FIELD")
    item_field: str = Field(alias="ITEM_ID_FIELD")
    field_separator: str = "\t"
    encoding: str | None = None
    load_col: Mapping[str, Any] | None = None
    alias_of_item_id: list[str] | None = None
    benchmark_filename: list[str] | None = None
    rm_dup_inter: str | None = None
    val_interval: Mapping[str, Any] | None = None
    user_inter_num_interval: str | None = None
    item_inter_num_interval: str | None = None


@dataclass(frozen=True, slots=True)
class SasRecCheckpoint:
    """A checkpoint as RecBole saved it."""

    config: RecBoleConfig
    sizes: Mapping[str, Any]
    """The parameters of `Net`."""
    tensors: Mapping[str, torch.Tensor]
    """Row 0 of the item table is of padding."""

    @property
    def items(self) -> int:
        """The number of items, which RecBole numbers from 1."""
        return int(self.sizes["items"]) - 1


class _Float(Inert):
    """The type of a storage of float32."""


@dataclass(frozen=True, slots=True)
class _Place:
    """A tensor of float32 that was not read yet."""

    record: str
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


def _place(storage: Any, offset: Any, size: Any, stride: Any, *_: object) -> _Place | Inert:
    numbers = (offset, *size, *stride)
    if not isinstance(storage, str) or not all(isinstance(each, int) and each >= 0 for each in numbers):
        return Inert()
    return _Place(storage, offset, size, stride)


class _Dict(dict[Any, Any]):
    """An OrderedDict, without the attributes that torch gives the one of a state dict."""

    def __init__(self) -> None:
        super().__init__()

    def __setstate__(self, state: object) -> None:
        pass


class _Config(Inert):
    """RecBole's object of a configuration."""

    values: Any = None

    def __setstate__(self, state: object) -> None:
        self.values = state.get("final_config_dict") if isinstance(state, dict) else None


_KNOWN: Final[Mapping[tuple[str, str], Callable[..., Any]]] = {
    ("torch._utils", "_rebuild_tensor_v2"): _place,
    ("torch", "FloatStorage"): _Float,
    ("collections", "OrderedDict"): _Dict,
    ("recbole.config.configurator", "Config"): _Config,
}


class _Unpickler(InertUnpickler):
    with_state: ClassVar[tuple[type, ...]] = (_Dict, _Config)

    def find_class(self, module: str, name: str) -> Any:
        return _KNOWN.get((module, name), Inert)

    def persistent_load(self, pid: Any) -> Any:
        """The name of a storage's record."""
        _, kind, key, *_ = pid
        return f"data/{key}" if kind is _Float and isinstance(key, str) else Inert()


def read_sasrec(path: Path) -> SasRecCheckpoint:
    """Raises RelayError if the file is no checkpoint of RecBole's SASRec."""
    try:
        with open_regular(path) as file:
            return _read(file)
    except RelayError as error:
        raise RelayError(f"{path} is no checkpoint of RecBole's SASRec: {error}.") from error
    # A file that RecBole did not write raises whichever error occurs first.
    except Exception as error:
        first_line = str(error).partition("\n")[0] or type(error).__name__
        raise RelayError(f"{path} cannot be read as a checkpoint of RecBole: {first_line}.") from error


def _read(file: BinaryIO) -> SasRecCheckpoint:
    file_bytes = file.seek(0, os.SEEK_END)
    file.seek(0)
    reader = open_archive(file, file_bytes)
    found = _Unpickler(io.BytesIO(reader.get_record(PICKLE)), file_bytes).load()
    values = getattr(found.get("config"), "values", None) if isinstance(found, dict) else None
    if not isinstance(values, dict):
        raise RelayError("it has no configuration of RecBole")
    if values.get("model") != _MODEL:
        raise RelayError(f"it is of the model {str(values.get('model'))[:40]}")
    try:
        config = RecBoleConfig.model_validate(values)
    except ValidationError as error:
        raise RelayError(f"its configuration is not of RecBole: {describe_problems(error)}") from error
    places = {name: each for name, each in found["state_dict"].items() if isinstance(each, _Place)}
    layers = next(count for count in range(len(places) + 1) if _LAYER.format(count) not in places)
    missing = sorted({ITEM_TABLE, _PLACES, _INNER} - places.keys())
    if missing:
        raise RelayError(f"it has no tensor {missing[0]}")
    items, width = places[ITEM_TABLE].size
    sizes: dict[str, Any] = {
        "items": items,
        "places": places[_PLACES].size[0],
        "layers": layers,
        "heads": config.n_heads,
        "width": width,
        "inner": places[_INNER].size[0],
        "activation": config.hidden_act,
        "eps": config.layer_norm_eps,
    }
    with torch.device("meta"):
        expected = {name: tuple(tensor.shape) for name, tensor in Net(**sizes).state_dict().items()}
    differs = sorted({(name, each.size) for name, each in places.items()} ^ set(expected.items()))
    if differs:
        raise RelayError(f"its tensor {differs[0][0]} is not that of these sizes")
    if 4 * sum(math.prod(shape) for shape in expected.values()) > file_bytes:
        raise RelayError("its tensors are larger than the file")
    return SasRecCheckpoint(config, sizes, {name: _tensor(reader, each) for name, each in places.items()})


def _tensor(reader: Any, place: _Place) -> torch.Tensor:
    if place.stride != tuple(math.prod(place.size[at + 1 :]) for at in range(len(place.size))):
        raise ValueError(f"{place.record} is not contiguous")
    stored = bytearray(reader.get_record(place.record))
    if place.offset or len(stored) != 4 * math.prod(place.size):
        # Many views of one large record would each bring all of it into memory.
        raise ValueError(f"{place.record} is not of one tensor alone")
    return torch.frombuffer(stored, dtype=torch.float32).view(place.size)


def write_sasrec(
    out: Path, checkpoint: SasRecCheckpoint, ids: NDArray[np.int64], max_suffix: int, max_candidates: int
) -> None:
    """Writes the folder of the ranker. `ids`: of the items that RecBole numbers 1, 2, ...

    Raises RelayError if the folder cannot be written.
    """
    order = torch.from_numpy(np.argsort(ids))
    table = checkpoint.tensors[ITEM_TABLE]
    tensors = {name: tensor.clone() for name, tensor in checkpoint.tensors.items() if name != ITEM_TABLE}
    tensors[ITEM_TABLE] = torch.cat((table[1:][order], table[:1]))
    tensors[ITEM_IDS] = torch.from_numpy(ids)[order]
    options = {**checkpoint.sizes, "max_suffix": max_suffix, "max_candidates": max_candidates}
    config = {"ranker": f"{SasRec.__module__}:{SasRec.__name__}", "options": options}
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_whole(out / WEIGHTS_FILE, save(tensors))
        write_whole(out / CONFIG_FILE, (json.dumps(config, indent=1) + "\n").encode())
    except OSError as error:
        raise RelayError(f"{out} cannot be written: {error}.") from error
