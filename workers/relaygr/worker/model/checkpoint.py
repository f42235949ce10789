"""A checkpoint: a folder with `config.json` and `model.safetensors`.

`config.json` fixes the name and shape of every tensor (`expected_tensors`). A file that disagrees is refused, and the
error names the tensor and both shapes. The *revision* is a hash of the canonical configuration and of each tensor's
name, type, shape and digest; the digest is a hash of its bytes. The same model has the same revision wherever it was
saved; a model with one different weight has another revision, so K,V of old weights can never match.

`save_checkpoint` writes the digests into the header of the weights file, with the time that it gives the file
(`_Stamp`). Loading trusts the digests of a file that has this time, so a large table is mapped and not read. A file
with another time was copied or changed: its digests are computed again, and a file that differs from them is refused.
A file without digests, of another tool, is read whole.

A deploy may point a link at another folder, or save into the same folder, while it is read. So a link is resolved once,
the weights file is opened once, and what was read is refused if either file is another one afterwards.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np
import structlog
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from relaygr.runtime.errors import RelayError
from relaygr.runtime.files import partial_of, read_regular, removed_on_failure, require_regular
from relaygr.worker.model.config import CONFIG_FILE, WEIGHTS_FILE, ModelConfig, read_config
from relaygr.worker.model.inputs.embedding import input_shapes
from relaygr.worker.model.inputs.known import IDS_TENSOR, Vocabulary
from relaygr.worker.model.inputs.tables import is_table
from relaygr.worker.model.layer_parts import copy_bytes
from relaygr.worker.model.layers import layer_shapes
from relaygr.worker.model.options import Family
from relaygr.worker.model.readout import readout_shapes

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_WHOLE_SUFFIX = ".rows"
_REVISION_BYTES = 16
_SHOWN = 8
_STAMP_KEY = "relaygr"
_SECOND_NS = 10**9
_BLOCK_ELEMENTS = 2**24

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A configuration and its tensors, checked against each other. Tables have their stored type, others float32."""

    config: ModelConfig
    tensors: Mapping[str, torch.Tensor]
    revision: str

    @property
    def num_parameters(self) -> int:
        return sum(tensor.numel() for name, tensor in self.tensors.items() if not _is_whole(name))

    @property
    def weights_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())

    def large_tables(self, most_bytes: int) -> frozenset[str]:
        """Names of the tables larger than `most_bytes`."""
        return frozenset(name for name, tensor in self.tensors.items() if is_table(name) and tensor.nbytes > most_bytes)

    def vocabulary(self) -> Vocabulary:
        """The vocabulary: item ids and their rows."""
        ids = self.tensors.get(IDS_TENSOR)
        return Vocabulary(self.config.vocabulary_size, None if ids is None else ids.numpy())


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a configuration requires: all but the optional `items.ids`."""
    if config.family is Family.NULL:
        return {}
    return input_shapes(config) | layer_shapes(config) | readout_shapes(config)


@dataclass(frozen=True, slots=True)
class _Stamp:
    """The header's record of the tensors: their digests, and the time that was given to the file, whole seconds."""

    time_s: int
    digests: Mapping[str, str]
    config: str = ""
    """The digest of the configuration that was saved with the tensors; files of earlier releases have none."""

    def is_of(self, path: Path) -> bool:
        """Whether the file has the recorded time. Copying tools may round it to seconds."""
        return path.stat().st_mtime_ns // _SECOND_NS == self.time_s


@dataclass(frozen=True, slots=True)
class Verification:
    """The result of reading a weights file whole."""

    has_digests: bool
    changed: tuple[str, ...]
    """Tensors that differ from their digests."""
    is_trusted: bool
    """Loading trusts the digests: the file has the time that was recorded with them."""
    size_bytes: int


def load_checkpoint(folder: Path) -> Checkpoint:
    """Raises RelayError if a file is missing or broken, disagrees with the configuration, or was changed."""
    folder = folder.resolve()
    finish_save(folder)
    files = _files(folder)
    config = read_config(folder)
    path = folder / WEIGHTS_FILE
    tensors: dict[str, torch.Tensor] = {}
    stamp: _Stamp | None = None
    if expected_tensors(config) or path.exists():
        tensors, stamp = _read(path)
    is_trusted = stamp is not None and stamp.is_of(path)
    # A save names the weights first: the configuration that belongs to them may wait for its name.
    finish_save(folder)
    if _files(folder) != files:
        raise RelayError(f"{folder} was replaced while it was read: load it again.")
    _check(config, tensors, str(path), are_values_known=is_trusted)
    if stamp is None or not is_trusted:
        digests = compute_digests(tensors)
        if stamp is not None:
            _refuse_changed(path, _changed(stamp.digests, digests))
            log.info(
                "digests computed again, because the weights file was copied: `relaygr model verify` avoids it",
                file=str(path),
            )
    else:
        digests = dict(stamp.digests)
    kept = {name: t if _is_whole(name) or is_table(name) else t.float() for name, t in tensors.items()}
    return Checkpoint(config, kept, _revision(config, tensors, digests))


def _files(folder: Path) -> list[tuple[int, int, int] | None]:
    return [file_identity(folder / name) for name in (CONFIG_FILE, WEIGHTS_FILE)]


def file_identity(path: Path) -> tuple[int, int, int] | None:
    """Inode, size and modification time of a file; None without a file."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def verify_checkpoint(folder: Path, *, trust: bool) -> Verification:
    """Reads all weights and compares them with their digests. `trust`: if they agree, gives the file its recorded time.

    Raises RelayError if a file is missing or broken, or cannot be given the time.
    """
    folder = folder.resolve()
    finish_save(folder)
    config = read_config(folder)
    path = folder / WEIGHTS_FILE
    if not expected_tensors(config) and not path.exists():
        return Verification(True, (), True, 0)
    tensors, stamp = _read(path)
    size_bytes = sum(tensor.nbytes for tensor in tensors.values())
    _check(config, tensors, str(path))
    if stamp is None:
        return Verification(False, (), False, size_bytes)
    changed = _changed(stamp.digests, compute_digests(tensors))
    if trust and not changed and not stamp.is_of(path):
        try:
            os.utime(path, ns=(stamp.time_s * _SECOND_NS,) * 2)
        except OSError as error:
            raise RelayError(f"{path} has its digests, but cannot be given its recorded time: {error}.") from error
    return Verification(True, tuple(changed), stamp.is_of(path), size_bytes)


def copied_bytes(shapes: Mapping[str, Sequence[int]], compute_dtype: torch.dtype, device_type: str) -> int:
    """The most memory for the copies that an engine's products make of their weights, beside the weights as loaded."""
    return sum(
        copy_bytes(shape, compute_dtype if name.startswith("layers.") else torch.float32, device_type)
        for name, shape in shapes.items()
        if _is_matrix(name, shape)
    )


def _is_matrix(name: str, shape: Sequence[int]) -> bool:
    """Whether a tensor is the weight of a product. Tables of positions, times and actions have names of two parts."""
    return len(shape) == 2 and name.count(".") > 1 and name.endswith(".weight") and not is_table(name)


def resident_bytes(folder: Path, device_table_bytes: int, compute_dtype: torch.dtype, device_type: str) -> int:
    """Memory for the weights of a folder and their copies, without its large tables; 0 without a readable file.

    Reads only the header.
    """
    path = folder / WEIGHTS_FILE
    total = 0
    shapes: dict[str, Sequence[int]] = {}
    try:
        require_regular(path)
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                part = file.get_slice(name)
                shapes[name] = part.get_shape()
                elements = math.prod(shapes[name])
                stored = elements * _STORED_BYTES.get(part.get_dtype(), 4)
                if not is_table(name):
                    total += stored if _is_whole(name) else elements * 4
                elif stored <= device_table_bytes:
                    total += stored
    except (OSError, SafetensorError):
        return 0
    return total + copied_bytes(shapes, compute_dtype, device_type)


_STORED_BYTES = {"F16": 2, "BF16": 2, "F32": 4, "I64": 8}


def _read(path: Path) -> tuple[dict[str, torch.Tensor], _Stamp | None]:
    """The tensors, mapped, and the record of them; None if another tool wrote the file."""
    try:
        # safetensors says of each file that it cannot open that there is none.
        require_regular(path)
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
            stamp = _stamp_of(file.metadata(), path)
    except (OSError, SafetensorError) as error:
        raise RelayError(f"{path} cannot be read: {error}.") from error
    if stamp is not None and set(stamp.digests) != set(tensors):
        raise RelayError(f"{path} has digests of other tensors than it contains.")
    return tensors, stamp


def _read_stamp(path: Path) -> _Stamp | None:
    """The record in the header; None if another tool wrote the file."""
    require_regular(path)
    with safe_open(path, framework="pt") as file:
        return _stamp_of(file.metadata(), path)


def _stamp_of(header: Mapping[str, str] | None, path: Path) -> _Stamp | None:
    record = (header or {}).get(_STAMP_KEY)
    if record is None:
        return None
    try:
        values = json.loads(record)
        digests = {str(name): str(digest) for name, digest in values["digests"].items()}
        stamp = _Stamp(int(values["time_s"]), digests, str(values.get("config", "")))
    # Another program may have put any JSON there: also numbers without end, and lists in lists.
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise RelayError(f"{path} has a broken record of its digests: {error}.") from error
    return stamp


def _changed(recorded: Mapping[str, str], computed: Mapping[str, str]) -> list[str]:
    return [name for name in sorted(recorded) if recorded[name] != computed[name]]


def _refuse_changed(path: Path, names: list[str]) -> None:
    if names:
        raise RelayError(
            f"{path} was changed after it was written: {', '.join(names[:_SHOWN])} differ from their digests. Convert "
            "or save the model again."
        )


def save_checkpoint(folder: Path, config: ModelConfig, tensors: Mapping[str, torch.Tensor]) -> Checkpoint:
    """Writes a folder that `load_checkpoint` reads. Raises RelayError if tensors and configuration disagree."""
    _check(config, tensors, str(folder / WEIGHTS_FILE))
    digests = compute_digests(tensors)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Each file gets its name only when both are complete, the weights first: `finish_save` gives the configuration
        # its name if this process ends in between.
        partial_config = partial_of(folder / CONFIG_FILE)
        with removed_on_failure(partial_config):
            partial_config.write_text(config.to_json(), encoding="utf-8")
            if tensors:
                _write_weights(folder / WEIGHTS_FILE, config, tensors, digests)
            else:
                (folder / WEIGHTS_FILE).unlink(missing_ok=True)
        # A reader may have done it.
        with contextlib.suppress(FileNotFoundError):
            partial_config.replace(folder / CONFIG_FILE)
    except (OSError, SafetensorError) as error:
        raise RelayError(f"{folder} cannot be written: {error}.") from error
    return Checkpoint(config, tensors, _revision(config, tensors, digests))


def _write_weights(
    path: Path, config: ModelConfig, tensors: Mapping[str, torch.Tensor], digests: Mapping[str, str]
) -> None:
    partial = partial_of(path)
    partial.unlink(missing_ok=True)
    with removed_on_failure(partial):
        partial.touch()
        mode = partial.stat().st_mode & 0o777
        # A time before the present second: whoever changes the file later gives it another time.
        written_ns = time.time_ns() - _SECOND_NS
        stamp = _Stamp(written_ns // _SECOND_NS, digests, _text_digest(config.to_json()))
        record = {_STAMP_KEY: json.dumps(asdict(stamp), sort_keys=True)}
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, partial, record)
        # safetensors replaces the file by one of mode 0600; a worker may run as another user than the operator.
        partial.chmod(mode)
        os.utime(partial, ns=(written_ns, written_ns))
        partial.replace(path)


def finish_save(folder: Path) -> None:
    """Ends a `save_checkpoint` that was interrupted after it had named the weights. Raises RelayError."""
    partial = partial_of(folder / CONFIG_FILE)
    try:
        if not partial.exists():
            return
        stamp = _read_stamp(folder / WEIGHTS_FILE)
        if stamp is not None and stamp.config == _text_digest(read_regular(partial).decode()):
            partial.replace(folder / CONFIG_FILE)
    except FileNotFoundError:
        # The save goes on, and has named the file itself; or it was interrupted before there were weights.
        return
    except (OSError, UnicodeDecodeError, SafetensorError) as error:
        raise RelayError(f"{folder} holds an interrupted save, which cannot be finished: {error}.") from error


def _text_digest(text: str) -> str:
    return blake2b(text.encode(), digest_size=_REVISION_BYTES).hexdigest()


def random_checkpoint(config: ModelConfig, seed: int, item_ids: NDArray[np.int64] | None = None) -> Checkpoint:
    """Random weights, scaled so that scores vary. The same seed and configuration give the same weights.

    `item_ids`: the vocabulary, strictly ascending; None: items 0 to vocabulary_size - 1. Raises RelayError if their
    number differs from the configuration's `vocabulary_size`.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: _random_tensor(name, shape, config, generator) for name, shape in expected_tensors(config).items()}
    if item_ids is not None and tensors:
        tensors[IDS_TENSOR] = torch.from_numpy(np.ascontiguousarray(item_ids, dtype=np.int64))
    _check(config, tensors, "the random model")
    return Checkpoint(config, tensors, compute_revision(config, tensors))


def _random_tensor(name: str, shape: tuple[int, ...], config: ModelConfig, generator: torch.Generator) -> torch.Tensor:
    if _is_whole(name):
        feature = expected_tensors(config)[name.replace(_WHOLE_SUFFIX, ".weight")]
        return torch.randint(feature[0], shape, generator=generator)
    noise: torch.Tensor = torch.randn(shape, generator=generator)
    kind = name.rsplit(".", 2)[-2:]
    if name.startswith(("items.", "features.", "item_features.", "actions.")):
        return noise
    if name in ("action_bits.weight", "action_bits.candidates"):
        return noise
    if name.startswith(("positions.", "times.")):
        return noise * 0.3
    if kind[0] == "relative_bias":
        return noise
    if kind[0].endswith("norm") and kind[1] == "weight":
        return 1.0 + 0.1 * noise
    if kind[-1] == "bias":
        return noise * 0.1
    fan_in = shape[-2]
    # Residual branches of many layers add up; this gain keeps the size of rows about constant.
    gain = (2.0 / config.num_layers) ** 0.5 if kind[0] == "output" else 2.0
    return noise.mul_(gain / fan_in**0.5)


def compute_digests(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """32 hex digits for each tensor: a hash of its bytes."""
    return {name: _digest(tensor) for name, tensor in tensors.items()}


def compute_revision(config: ModelConfig, tensors: Mapping[str, torch.Tensor]) -> str:
    """32 hex digits: a hash of the configuration and of all weights as stored."""
    return _revision(config, tensors, compute_digests(tensors))


def _revision(config: ModelConfig, tensors: Mapping[str, torch.Tensor], digests: Mapping[str, str]) -> str:
    revision = blake2b(digest_size=_REVISION_BYTES)
    revision.update(config.to_json().encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        revision.update(f"\0{name}\0{tensor.dtype}\0{list(tensor.shape)}\0{digests[name]}".encode())
    return revision.hexdigest()


def _digest(tensor: torch.Tensor) -> str:
    digest = blake2b(digest_size=_REVISION_BYTES)
    digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _check(
    config: ModelConfig, tensors: Mapping[str, torch.Tensor], origin: str, *, are_values_known: bool = False
) -> None:
    """Raises RelayError for wrong names, shapes and types, and, unless they are known to be right, for wrong values."""
    expected = expected_tensors(config)
    problems = [f"{name} is missing, expected {list(shape)}" for name, shape in expected.items() if name not in tensors]
    for name, tensor in tensors.items():
        if name == IDS_TENSOR:
            problems += _id_problems(config, tensor, are_values_known)
        elif name not in expected:
            problems.append(f"{name} {list(tensor.shape)} is not part of this configuration")
        elif tuple(tensor.shape) != expected[name]:
            problems.append(f"{name} is {list(tensor.shape)}, expected {list(expected[name])}")
        elif _is_whole(name):
            problems += _row_problems(name, tensor, expected, are_values_known)
        elif tensor.dtype not in _FLOATS:
            problems.append(f"{name} is {tensor.dtype}, expected float32, bfloat16 or float16")
        elif not are_values_known and not _is_finite(tensor):
            problems.append(f"{name} holds values that are not finite")
    if problems:
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        shown = "; ".join(problems[:_SHOWN])
        raise RelayError(f"{origin} disagrees with its {CONFIG_FILE}: {shown}{more}.")


def _is_whole(name: str) -> bool:
    """Whether a tensor holds whole numbers."""
    return name == IDS_TENSOR or name.endswith(_WHOLE_SUFFIX)


def _is_finite(tensor: torch.Tensor) -> bool:
    """In blocks, since the result of one comparison is a fourth of a table."""
    return all(bool(torch.isfinite(block).all()) for block in torch.split(tensor.reshape(-1), _BLOCK_ELEMENTS))


def _row_problems(
    name: str, rows: torch.Tensor, expected: Mapping[str, tuple[int, ...]], are_values_known: bool
) -> list[str]:
    limit = expected[name.replace(_WHOLE_SUFFIX, ".weight")][0]
    if rows.dtype is not torch.int64:
        return [f"{name} is {rows.dtype}, expected int64"]
    if not are_values_known and bool(((rows < 0) | (rows >= limit)).any()):
        return [f"{name} names rows outside 0 to {limit - 1}"]
    return []


def _id_problems(config: ModelConfig, ids: torch.Tensor, are_values_known: bool) -> list[str]:
    wanted = (config.vocabulary_size,)
    if ids.dtype is not torch.int64 or tuple(ids.shape) != wanted:
        return [f"{IDS_TENSOR} is {ids.dtype} {list(ids.shape)}, expected int64 {list(wanted)}"]
    if not are_values_known and bool((ids[1:] <= ids[:-1]).any()):
        return [f"{IDS_TENSOR} does not rise strictly"]
    return []
