"""The classes of work that the device runs, and what the scheduler asks of a piece of work."""

from __future__ import annotations

import enum
from typing import Final, Protocol


class WorkClass(enum.StrEnum):
    """Which deadline the work serves: that of a ranking request, of a pre-infer job, or none."""

    RANKING = "ranking"
    PREINFER = "preinfer"
    WARM_UP = "warm_up"
    FOLLOW = "follow"
    """New behaviours, appended to a cached prefix before anyone asks."""


IDLE_CLASSES: Final = (WorkClass.WARM_UP, WorkClass.FOLLOW)
"""Work for nobody yet. It shares the queue of warm-up, and the bound on its device time."""


class SchedulableWork(Protocol):
    """Work that the device can run, whole or in chunks."""

    @property
    def work_class(self) -> WorkClass: ...

    @property
    def latest_start_us(self) -> int:
        """Deadline less predicted remaining device time, on the monotonic clock."""

    @property
    def remaining_us(self) -> float:
        """Its demand: time of the device thread that ranking work still needs, the worker's own time included."""

    @property
    def runs_in_chunks(self) -> bool:
        """Whether other work may run before it ends."""

    @property
    def may_be_displaced(self) -> bool:
        """Whether it may be given up for shorter work: most of it is still to be done."""
