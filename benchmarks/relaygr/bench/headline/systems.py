"""The systems that are compared. They differ in the settings below, in whether retrieval events are sent, and in
nothing else: weights, types, kernels, memory, topics and the load generator are the same.

| system | what | retrieval events | settings |
|---|---|---|---|
| B0 | full inference at ranking, without chunks, its batches tuned | no | `worker.reuse_prefixes=false` |
| B1 | B0 on a model whose longest history is what meets the deadline: what production does today | no | as B0 |
| C | cache across requests, no pre-infer | no | |
| R-hbm | the relay without DRAM | yes | `worker.dram_bytes=0` |
| R | the relay | yes | |
| R-admit | R without a bound on pre-infer | yes | `admission.load_limit=1`, `admission.footprint_reserve=0` |
| O | oracle: the K,V of every request is ready in HBM, and computing it cost nothing | no | HBM for all users |

The ablations *no single flight*, *unbounded reloads*, *random routing* and *no append* are left out: the product has no
setting for them, and random routing shows nothing with one worker.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class System(enum.StrEnum):
    """A compared system."""

    B0 = "B0"
    B1 = "B1"
    C = "C"
    R_HBM = "R-hbm"
    R = "R"
    R_ADMIT = "R-admit"
    O = "O"  # noqa: E741 - its name in the literature


@dataclass(frozen=True, slots=True)
class SystemFlags:
    """How a system differs from the others."""

    events: bool = False
    """Whether retrieval events are sent and a trigger runs."""
    reuse: bool = True
    dram: bool = True
    bounded: bool = True
    """Whether admission bounds pre-infer."""


FLAGS = {
    System.B0: SystemFlags(reuse=False, dram=False),
    System.B1: SystemFlags(reuse=False, dram=False),
    System.C: SystemFlags(),
    System.R_HBM: SystemFlags(events=True, dram=False),
    System.R: SystemFlags(events=True),
    System.R_ADMIT: SystemFlags(events=True, bounded=False),
    System.O: SystemFlags(dram=False),
}
QUICK_SYSTEMS = (System.B0, System.C, System.R, System.O)
"""B0 is the first in every order: the others are compared with it."""
