"""A device `npu` without an NPU: torch's PrivateUse1 key, taken by a back end in Python whose memory is the CPU's.

Installing it cannot be undone, so tests install it in a process of their own, where `torch_npu` is this module. It
computes on the CPU, and is as strict as a device: an operator whose tensors are on both devices is refused; only copies
may mix them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import backend_registration
from torch.utils._pytree import tree_iter, tree_map

_CPU = torch.device("cpu")
_aten = torch.ops.aten
_CROSSING = {_aten._to_copy.default, _aten.copy_.default}
operators: set[str] = set()
"""The operators that ran on the device."""


class NpuTensor(torch.Tensor):
    """A tensor whose device is npu:0."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> NpuTensor:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=torch.device("npu", 0),
        )
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    tensors = [value for value in tree_iter((args, kwargs)) if isinstance(value, torch.Tensor)]
    if func not in _CROSSING and any(not isinstance(tensor, NpuTensor) and tensor.dim() for tensor in tensors):
        raise RuntimeError(f"{func}: expected all tensors to be on npu:0, found some on the cpu")
    operators.add(str(func))
    wrappers = {id(tensor.inner): tensor for tensor in tensors if isinstance(tensor, NpuTensor)}
    to_cpu = kwargs.get("device") == _CPU
    inner_args, inner_kwargs = tree_map(lambda x: x.inner if isinstance(x, NpuTensor) else x, (args, dict(kwargs)))
    if inner_kwargs.get("device") is not None:
        inner_kwargs["device"] = _CPU
    inner_kwargs.pop("pin_memory", None)
    out = func(*inner_args, **inner_kwargs)

    def wrapped(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or to_cpu:
            return value
        return wrappers.get(id(value)) if id(value) in wrappers else NpuTensor(value)

    if func is _aten.copy_.default and not isinstance(args[0], NpuTensor):
        return args[0]
    return tree_map(wrapped, out)


def install() -> None:
    """Makes `npu` a device of this process. Before modules that use torch.inference_mode are imported."""
    # Tensors that are Python objects cannot be inference tensors: what changes is only what autograd would note.
    torch.inference_mode = torch.no_grad  # type: ignore[misc,assignment]
    # It passes by the operators that a back end in Python can take.
    torch.tensor = _tensor
    torch.empty = _empty  # type: ignore[assignment]
    backend_registration._setup_privateuseone_for_python_backend("npu")
    library = torch.library.Library("_", "IMPL")
    library.fallback(lambda func, *args, **kwargs: _run(func, args, kwargs), "PrivateUse1")
    _kept.append(library)


_make = torch.tensor


def _tensor(*args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
    made = _make(*args, **kwargs)
    return made if device is None else made.to(device)


_allocate = torch.empty


def _empty(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
    """Ignores pinning, since all host memory counts as pinned."""
    return _allocate(*args, **kwargs)


_kept: list[torch.library.Library] = []
