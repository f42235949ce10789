"""What the process gives an executor. Its collaborators read it, and none writes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from relaygr.admission.corrector import Corrector
from relaygr.admission.settings import AdmissionSettings
from relaygr.runtime.clock import Clock
from relaygr.schemas.record import record
from relaygr.worker.cache import PageCopy, PrefixCache, Tier
from relaygr.worker.cache.results import PageArray
from relaygr.worker.executor.device_record import DeviceRecord
from relaygr.worker.executor.job_admission import JobAdmission
from relaygr.worker.executor.resolver import HistoryReader
from relaygr.worker.metrics import WorkerMetrics
from relaygr.worker.results import ResultWriter
from relaygr.worker.settings import WorkerSettings

if TYPE_CHECKING:
    # The simulation runs the executor without torch.
    from relaygr.worker.divert import Diverter
    from relaygr.worker.pool.tier import PoolTier


@record(frozen=True, slots=True, kw_only=True)
class ExecutorParts:
    """The parts of an executor without the model. `scratch_pages` are arena pages outside the cache, enough for the
    longest prefix; `copy_page` copies one page of the arena, and `zero_pages` zeroes pages of a tier.
    """

    cache: PrefixCache
    scratch_pages: NDArray[np.int32]
    copy_page: Callable[[PageCopy], None]
    zero_pages: Callable[[Tier, PageArray], None] = lambda _tier, _pages: None
    histories: HistoryReader
    corrector: Corrector
    settings: WorkerSettings
    admission_settings: AdmissionSettings
    admission: JobAdmission
    device_record: DeviceRecord
    results: ResultWriter
    metrics: WorkerMetrics
    clock: Clock
    diverter: Diverter | None = None
    """Passes requests on to other workers; None without `worker.divert`."""
    pool: PoolTier | None = None
    """A third tier of prefixes; None without `worker.pool`."""
