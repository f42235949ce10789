"""A checkpoint: a folder with `config.json` and `model.safetensors`.

`config.json` fixes the name and shape of every tensor (`expected_tensors`). A file that disagrees is refused, and the
error names the tensor and both shapes. The *revision* is a hash of the canonical configuration and of each tensor's
name, type, shape and bytes. The same model has the same revision wherever it was saved; a model with one different
weight has another revision, so K,V of old weights can never match.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from relaygr.runtime.errors import RelayError
from relaygr.worker.model.config import CONFIG_FILE, ModelConfig, read_config
from relaygr.worker.model.inputs.embedding import input_shapes
from relaygr.worker.model.inputs.lookup import IDS_TENSOR, Vocabulary
from relaygr.worker.model.layers import layer_shapes
from relaygr.worker.model.options import Family
from relaygr.worker.model.readout import readout_shapes

WEIGHTS_FILE = "model.safetensors"
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_WHOLE_SUFFIX = ".rows"
_REVISION_BYTES = 16
_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A configuration and its tensors, checked against each other. Floats are float32."""

    config: ModelConfig
    tensors: Mapping[str, torch.Tensor]
    revision: str

    @property
    def num_parameters(self) -> int:
        return sum(tensor.numel() for name, tensor in self.tensors.items() if not _is_whole(name))

    @property
    def weights_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())

    def vocabulary(self) -> Vocabulary:
        """The vocabulary: item ids and their rows."""
        ids = self.tensors.get(IDS_TENSOR)
        return Vocabulary(self.config.vocabulary_size, None if ids is None else ids.numpy())


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a configuration requires: all but the optional `items.ids`."""
    if config.family is Family.NULL:
        return {}
    return input_shapes(config) | layer_shapes(config) | readout_shapes(config)


def load_checkpoint(folder: Path) -> Checkpoint:
    """Raises RelayError if a file is missing or broken, or disagrees with the configuration."""
    config = read_config(folder)
    path = folder / WEIGHTS_FILE
    tensors: dict[str, torch.Tensor] = {}
    if expected_tensors(config) or path.exists():
        try:
            tensors = load_file(path)
        except (OSError, SafetensorError) as error:
            raise RelayError(f"{path} cannot be read: {error}.") from error
    _check(config, tensors, str(path))
    revision = compute_revision(config, tensors)
    as_floats = {name: tensor if _is_whole(name) else tensor.float() for name, tensor in tensors.items()}
    return Checkpoint(config, as_floats, revision)


def save_checkpoint(folder: Path, config: ModelConfig, tensors: Mapping[str, torch.Tensor]) -> Checkpoint:
    """Writes a folder that `load_checkpoint` reads. Raises RelayError if tensors and configuration disagree."""
    _check(config, tensors, str(folder / WEIGHTS_FILE))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Each file gets its name only when it is complete, the weights first: a reader never sees half a checkpoint.
        if tensors:
            partial = folder / f".{WEIGHTS_FILE}.partial"
            partial.unlink(missing_ok=True)
            partial.touch()
            mode = partial.stat().st_mode & 0o777
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, partial)
            # safetensors replaces the file by one of mode 0600; a worker may run as another user than the operator.
            partial.chmod(mode)
            partial.replace(folder / WEIGHTS_FILE)
        else:
            (folder / WEIGHTS_FILE).unlink(missing_ok=True)
        partial = folder / f".{CONFIG_FILE}.partial"
        partial.write_text(config.to_json(), encoding="utf-8")
        partial.replace(folder / CONFIG_FILE)
    except (OSError, SafetensorError) as error:
        raise RelayError(f"{folder} cannot be written: {error}.") from error
    return Checkpoint(config, tensors, compute_revision(config, tensors))


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


def compute_revision(config: ModelConfig, tensors: Mapping[str, torch.Tensor]) -> str:
    """32 hex digits: a hash of the configuration and of all weights as stored."""
    digest = blake2b(digest_size=_REVISION_BYTES)
    digest.update(config.to_json().encode())
    for name in sorted(tensors):
        tensor = tensors[name].detach().contiguous()
        digest.update(f"\0{name}\0{tensor.dtype}\0{list(tensor.shape)}\0".encode())
        digest.update(tensor.view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _check(config: ModelConfig, tensors: Mapping[str, torch.Tensor], origin: str) -> None:
    expected = expected_tensors(config)
    problems = [f"{name} is missing, expected {list(shape)}" for name, shape in expected.items() if name not in tensors]
    for name, tensor in tensors.items():
        if name == IDS_TENSOR:
            problems += _id_problems(config, tensor)
        elif name not in expected:
            problems.append(f"{name} {list(tensor.shape)} is not part of this configuration")
        elif tuple(tensor.shape) != expected[name]:
            problems.append(f"{name} is {list(tensor.shape)}, expected {list(expected[name])}")
        elif _is_whole(name):
            problems += _row_problems(name, tensor, expected)
        elif tensor.dtype not in _FLOATS:
            problems.append(f"{name} is {tensor.dtype}, expected float32, bfloat16 or float16")
        elif not bool(torch.isfinite(tensor).all()):
            problems.append(f"{name} holds values that are not finite")
    if problems:
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        shown = "; ".join(problems[:_SHOWN])
        raise RelayError(f"{origin} disagrees with its {CONFIG_FILE}: {shown}{more}.")


def _is_whole(name: str) -> bool:
    """Whether a tensor holds whole numbers."""
    return name == IDS_TENSOR or name.endswith(_WHOLE_SUFFIX)


def _row_problems(name: str, rows: torch.Tensor, expected: Mapping[str, tuple[int, ...]]) -> list[str]:
    limit = expected[name.replace(_WHOLE_SUFFIX, ".weight")][0]
    if rows.dtype is not torch.int64:
        return [f"{name} is {rows.dtype}, expected int64"]
    if bool(((rows < 0) | (rows >= limit)).any()):
        return [f"{name} names rows outside 0 to {limit - 1}"]
    return []


def _id_problems(config: ModelConfig, ids: torch.Tensor) -> list[str]:
    wanted = (config.vocabulary_size,)
    if ids.dtype is not torch.int64 or tuple(ids.shape) != wanted:
        return [f"{IDS_TENSOR} is {ids.dtype} {list(ids.shape)}, expected int64 {list(wanted)}"]
    if bool((ids[1:] <= ids[:-1]).any()):
        return [f"{IDS_TENSOR} does not rise strictly"]
    return []
