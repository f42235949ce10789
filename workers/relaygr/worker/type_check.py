"""What types in fewer bits change of a model's scores, each beside the type that loses nothing.

    setting          compared with
    kv_dtype         K,V in the type of the products
    dram_kv_dtype    K,V as they were on the device
    compute_dtype    products in float32

`relaygr model check` measures each type. A worker measures those of 8 bits that it is set to, before it serves
(`process.trial`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from relaygr.runtime.errors import RelayError
from relaygr.worker.device import open_device
from relaygr.worker.kv import DramGeometry, DramKvDtype, KvDtype
from relaygr.worker.model.engine import default_dtypes, load_engine
from relaygr.worker.model.interface import Engine
from relaygr.worker.model.options import ComputeDtype
from relaygr.worker.score_error import SampleUser, ScoreError, exact_kv, measure_dram_error, measure_engine_error

ServedType: TypeAlias = KvDtype | DramKvDtype | ComputeDtype
_SETTINGS: Final[dict[type[ServedType], str]] = {
    KvDtype: "kv_dtype",
    DramKvDtype: "dram_kv_dtype",
    ComputeDtype: "compute_dtype",
}


_NO_TIME: Final = "No time was left (--minutes)."


@dataclass(frozen=True, slots=True)
class TypeFinding:
    """The result for one type of a setting."""

    dtype: ServedType
    exact: ServedType
    """The type with which it is compared."""
    error: ScoreError | None = None
    """None if it was not measured."""
    room: float = 1.0
    """How many times as many prefixes fit into the same memory."""
    not_measured: str = ""
    """Why, as a sentence."""

    @property
    def is_refused(self) -> bool:
        """Whether the model cannot run so."""
        return self.error is None and self.not_measured != _NO_TIME

    @property
    def setting(self) -> str:
        """The name of the setting, in the section `worker`."""
        return _SETTINGS[type(self.dtype)]

    @property
    def text(self) -> str:
        if isinstance(self.dtype, DramKvDtype):
            return f"K,V {self.dtype} in DRAM, compared with {self.exact} as on the device"
        what = "K,V" if isinstance(self.dtype, KvDtype) else "products in"
        return f"{what} {self.dtype}, compared with {self.exact}"


class TypeCheck:
    """Loads a model in each type, and beside it in the type that loses nothing, which stays for the next one."""

    def __init__(
        self,
        model: Path,
        device: str | None,
        ranker_modules: Sequence[str],
        kv_dtype: KvDtype | None = None,
        compute_dtype: ComputeDtype | None = None,
    ) -> None:
        """`kv_dtype` and `compute_dtype` are of the model while another type is measured. None: the device's default.

        Raises RelayError if the device is missing.
        """
        default_kv, default_compute = default_dtypes(open_device(device))
        self._kv_dtype, self._compute_dtype = kv_dtype or default_kv, compute_dtype or default_compute

        def load(kv: KvDtype, compute: ComputeDtype) -> Engine:
            return load_engine(model, device, kv, compute_dtype=compute, ranker_modules=ranker_modules)

        self._load = load
        self._kept: tuple[KvDtype, ComputeDtype, Engine] | None = None

    def is_used(self, found: TypeFinding) -> bool:
        """Whether a worker takes this type here, unless it is set to another one."""
        used: dict[type, ServedType] = {KvDtype: self._kv_dtype, ComputeDtype: self._compute_dtype}
        return used.get(type(found.dtype)) is found.dtype

    def every_type(self) -> list[ServedType]:
        """Each type that loses something."""
        exact = (KvDtype.FLOAT32, exact_kv(self._compute_dtype))
        return [
            *(dtype for dtype in KvDtype if dtype not in exact),
            *(dtype for dtype in DramKvDtype if not dtype.keeps(self._kv_dtype)),
            *(dtype for dtype in ComputeDtype if dtype is not ComputeDtype.FLOAT32),
        ]

    def run(
        self,
        types: Sequence[ServedType],
        users: Sequence[SampleUser],
        candidates: NDArray[np.int64],
        seconds: float,
        *,
        all_of_them: bool = False,
    ) -> Iterator[TypeFinding]:
        """The findings, one by one. Each type has its part of the time, and is measured for one user at least.

        `all_of_them`: also after the time. Else those that are left then are not measured, but for the first.
        """
        until_s = time.monotonic() + seconds
        for index, dtype in enumerate(types):
            exact, left_s = self._exact(dtype), until_s - time.monotonic()
            if index and left_s <= 0 and not all_of_them:
                yield TypeFinding(dtype, exact, not_measured=_NO_TIME)
                continue
            try:
                error, room = self._measure(dtype, exact, users, candidates, left_s / (len(types) - index))
            except RelayError as refused:
                yield TypeFinding(dtype, exact, not_measured=str(refused))
            else:
                yield TypeFinding(dtype, exact, error, room)

    def _exact(self, dtype: ServedType) -> ServedType:
        if isinstance(dtype, KvDtype):
            return exact_kv(self._compute_dtype)
        return self._kv_dtype if isinstance(dtype, DramKvDtype) else ComputeDtype.FLOAT32

    def _measure(
        self,
        dtype: ServedType,
        exact: ServedType,
        users: Sequence[SampleUser],
        candidates: NDArray[np.int64],
        seconds: float,
    ) -> tuple[ScoreError, float]:
        """The error, and how many times as many prefixes fit. Raises RelayError if the model can not run so."""
        if isinstance(dtype, DramKvDtype):
            wide = self._keep(self._kv_dtype, self._compute_dtype)
            error = measure_dram_error(wide, dtype, users, candidates, seconds)
            return error, wide.geometry.page_bytes / DramGeometry(wide.geometry, dtype).page_bytes
        if isinstance(dtype, KvDtype):
            assert isinstance(exact, KvDtype)
            wide = self._keep(exact, self._compute_dtype)
            engine = self._load(dtype, self._compute_dtype)
        else:
            assert isinstance(exact, ComputeDtype)
            wide, engine = self._keep(self._kv_dtype, exact), self._load(self._kv_dtype, dtype)
        error = measure_engine_error(engine, wide, users, candidates, seconds)
        return error, wide.geometry.page_bytes / engine.geometry.page_bytes

    def _keep(self, kv: KvDtype, compute: ComputeDtype) -> Engine:
        """The engine that loses nothing. The one before it is let go first: two at a time have to fit."""
        if self._kept is None or self._kept[:2] != (kv, compute):
            self._kept = None
            self._kept = kv, compute, self._load(kv, compute)
        return self._kept[2]
