"""The systems that are compared. They differ in the settings below, in whether retrieval events are sent, and in
nothing else: weights, types, kernels, memory, topics and the load generator are the same.

Ablations that no setting of the product allows are left out: no single flight, reloads without a bound, another order
than that of deadlines. Random routing shows nothing with one worker.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pydantic import ByteSize

from relaygr.bench.headline.grid import PAGE_TOKENS, Cell
from relaygr.demo.summary import SCORE_TOLERANCE
from relaygr.worker.settings import WorkerSettings

if TYPE_CHECKING:
    from relaygr.bench.headline.plan import CellPlan


INT8_TOLERANCE: float = WorkerSettings.model_fields["dram_max_score_error"].default
"""A worker whose DRAM tier would change a score by more does not start."""


GRACE_MS = 1_000.0
"""For so long after its deadline B0-late still computes a request. Under too high a load this bounds its queue."""


class System(enum.StrEnum):
    """A compared system."""

    B0 = "B0"
    """Full inference at ranking, without chunks, its batches tuned."""
    B0_LATE = "B0-late"
    """B0 that truncates and refuses no request because it may be late. Here that counts as late, too."""
    B0_THREADS = "B0-threads"
    """B0 on two threads. All but the -threads systems have one, since the broker needs the other core."""
    B1 = "B1"
    """B0 on a model whose longest history is what meets the deadline: what production does today."""
    C = "C"
    """A cache across requests, no pre-infer."""
    R_HBM = "R-hbm"
    """The relay without DRAM."""
    R = "R"
    """The relay."""
    R_ALWAYS = "R-always"
    """Pre-infer for every impression, whether full inference would meet its deadline or not."""
    R_ADMIT = "R-admit"
    """Pre-infer without a bound on load and memory."""
    R_SHARE = "R-share"
    """Pre-infer only in the time that ranking leaves."""
    R_UNCUT = "R-uncut"
    """A prefix is computed in one piece."""
    R_APPEND = "R-append"
    """A history that grew is computed in full."""
    R_INT8 = "R-int8"
    """The relay with K,V in DRAM as int8: the same bytes hold up to four times as many prefixes, and scores on
    reloaded prefixes are approximate."""
    R_TAIL = "R-tail"
    """Each history that grew is appended to its prefix, however short its tail is."""
    R_THREADS = "R-threads"
    """The relay on two threads."""
    O = "O"  # noqa: E741 - its name in the literature
    """The oracle: the K,V of every request is ready in HBM, and computing it cost nothing."""


@dataclass(frozen=True, slots=True)
class SystemFlags:
    """How a system differs from the others."""

    events: bool = False
    """Whether retrieval events are sent and a trigger runs."""
    reuse: bool = True
    chunks: bool = True
    """Whether a prefix may be computed in several chunks."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Values that the product's settings have instead."""
    score_tolerance: float = SCORE_TOLERANCE
    """The largest difference of a score from B0's, relative to the largest score."""

    @property
    def is_exact(self) -> bool:
        return self.score_tolerance == SCORE_TOLERANCE


FLAGS = {
    System.B0: SystemFlags(reuse=False, chunks=False),
    System.B0_LATE: SystemFlags(reuse=False, chunks=False, settings={"worker.grace_ms": GRACE_MS}),
    System.B0_THREADS: SystemFlags(reuse=False, chunks=False, settings={"worker.threads": 2}),
    System.B1: SystemFlags(reuse=False, chunks=False),
    System.C: SystemFlags(),
    System.R_HBM: SystemFlags(events=True, settings={"worker.dram_bytes": 0}),
    System.R: SystemFlags(events=True),
    System.R_ALWAYS: SystemFlags(events=True, settings={"trigger.only_at_risk": False}),
    System.R_ADMIT: SystemFlags(
        events=True, settings={"admission.load_limit": 1.0, "admission.footprint_reserve": 0.0}
    ),
    System.R_SHARE: SystemFlags(events=True, settings={"admission.preinfer_share": 0.0}),
    System.R_UNCUT: SystemFlags(
        events=True, chunks=False, settings={"worker.chunk_ms": 60_000.0, "worker.longest_chunk_ms": 60_000.0}
    ),
    System.R_APPEND: SystemFlags(events=True, settings={"worker.extend_prefixes": False}),
    System.R_INT8: SystemFlags(events=True, settings={"worker.dram_kv_dtype": "int8"}, score_tolerance=INT8_TOLERANCE),
    System.R_TAIL: SystemFlags(events=True, settings={"worker.longest_tail": 0}),
    System.R_THREADS: SystemFlags(events=True, settings={"worker.threads": 2}),
    System.O: SystemFlags(settings={"worker.dram_bytes": 0}),
}
"""B0 is the first in every order: the others are compared with it."""
QUICK_SYSTEMS = (System.B0, System.C, System.R, System.O)
SIMULATED_SYSTEMS = (System.B0, System.C, System.R)
NOT_SIMULATED: Mapping[System, str] = {
    System.B1: "B1 and O are not simulated",
    System.O: "B1 and O are not simulated",
    System.B0_THREADS: "B0-threads is not simulated: the engine is timed on one thread",
    System.R_THREADS: "R-threads is not simulated: the engine is timed on one thread",
}
"""With the reason."""
UNCUT = "uncut"
TUNED: Mapping[str, Mapping[str, Any]] = {
    UNCUT: {},
    "one at a time": {"max_batch_requests": 1},
    "chunks of 2,048": {"max_chunk_tokens": 2_048},
}
"""The variants of B0. The fastest one at half load stands for it, and B1 has its settings, too."""
LIMITED = ", at most "
"""In the variant of B1, after that of B0."""


def settings_of(cell: Cell, plan: CellPlan, system: System, variant: str) -> dict[str, dict[str, Any]]:
    """The settings of a system in a cell, by section, without those of its processes."""
    flags = FLAGS[system]
    values: dict[str, dict[str, Any]] = {
        "worker": {
            "reuse_prefixes": flags.reuse,
            "page_tokens": PAGE_TOKENS,
            "hbm_bytes": ByteSize(plan.hbm_bytes),
            "dram_bytes": ByteSize(plan.dram_bytes if flags.reuse else 0),
            "history_max_bytes": ByteSize(8 << 30),
            # Full inference needs no cuts: they cost it time.
            **({} if flags.chunks else {"max_chunk_tokens": cell.longest_history}),
        }
    }
    for name, value in flags.settings.items():
        section, _, key = name.partition(".")
        values.setdefault(section, {})[key] = value
    values["worker"].update(TUNED.get(variant.partition(LIMITED)[0], {}))
    return values
