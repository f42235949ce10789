"""The cells: the loads and limits under which the systems are compared. They were committed before any measurement.
Only `MEMORY` and `LOOSE` came later, for the reasons there.

Times are factors of what the engine alone takes on the machine, so that a cell asks the same of a CPU and of an
accelerator. `plan.py` turns them into milliseconds, and the report prints both.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from dataclasses import dataclass, replace

from relaygr.worker.model.config import ModelConfig

ITEMS = 10_000
PAGE_TOKENS = 64
LENGTH_FACTORS = (1 / 8, 4)
"""The shortest and the longest history of figure A, as factors of the cell's median."""
REUSES = (0.0, 0.6)
"""Every cell is measured at these shares of returning users, too. 0.6 is the only hit rate of such a system in
production that is public (SequenceO1).
"""
TAIL_ROOM = 64
"""Room in the longest suffix, beside the request's own behaviours, for those that came since the prefix was made."""
SHORT = 1 / 4
"""The history at which figure A takes the capacity of B0, as a factor of the cell's median."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One question. The name is unique, and stands in every row."""

    name: str
    history: int
    """Median length, behaviours. Each is one token."""
    deadline_factor: float
    """The deadline, as a multiple of full inference on the median history by the engine alone."""
    lead_factor: float
    """The median lead time, as a multiple of computing the median prefix by the engine alone."""
    reuse: float
    """The share of impressions whose user came before."""
    return_gap_s: float = 8.0
    candidates: int = 128
    suffix: int = 16
    layers: int = 2
    heads: int = 2
    head_width: int = 64
    history_sigma: float = 0.2
    growth: int = 8
    zipf: float = 0.5
    burst_factor: float = 1.0
    hot_user_share: float = 0.0
    hbm_prefixes: int = 48
    """The size of the HBM tier, in prefixes of median length."""
    dram_prefixes: int = 192
    least_deadline_ms: int = 40
    """Broker, trigger and gateway have a tail of their own, which the deadline must leave room for."""
    planned_as: str = ""
    """The cell whose times and sizes on this machine hold here, too. Empty: this cell has its own."""
    origin: str = ""
    """For a cell that others published: who, and what differs from theirs. For a late one: why it was added."""

    @property
    def plan_name(self) -> str:
        return self.planned_as or self.name

    @property
    def family(self) -> Cell:
        """Equal for cells that differ in the share of returning users alone."""
        return replace(self, name="", planned_as="", origin="", reuse=0.0)

    @property
    def shape(self) -> str:
        """The sizes of the model and its requests. Cells of one shape share the engine's times."""
        model = f"{self.layers}x{self.heads}x{self.head_width}"
        return f"n{self.history}-s{self.suffix}-c{self.candidates}-{model}"

    @property
    def longest_history(self) -> int:
        """The longest history of any run, growth and spread included."""
        return int(self.history * LENGTH_FACTORS[1] * 2)

    @property
    def longest_suffix(self) -> int:
        """With room for behaviours that came since the prefix was computed."""
        return self.suffix + TAIL_ROOM

    @property
    def digest(self) -> str:
        """Eight hexadecimal digits of what is asked."""
        return hashlib.blake2b(repr(self.family).encode(), digest_size=4).hexdigest()

    def model(self) -> ModelConfig:
        """The model, the same for all systems and lengths of the cell."""
        width = self.heads * self.head_width
        return ModelConfig(
            embedding_dim=width,
            num_heads=self.heads,
            attention_dim=self.head_width,
            hidden_dim=self.head_width,
            num_layers=self.layers,
            normalizer=float(self.longest_history),
            vocabulary_size=ITEMS,
            num_actions=8,
            num_positions=self.longest_history + self.longest_suffix + 1,
            max_prefix_behaviours=self.longest_history,
            max_suffix_behaviours=self.longest_suffix,
            max_candidates=self.candidates,
        )


CENTRE = Cell("centre", history=2_048, deadline_factor=2.5, lead_factor=3.0, reuse=0.6)
QUICK = replace(CENTRE, name="quick", deadline_factor=5.0, reuse=0.9, return_gap_s=2.0)
"""The one cell of `--quick`, which is also measured at the shares of `REUSES`. Its runs are short, so its users return
sooner. At a tighter deadline B0 uses less than 30 % of the device, so figure B would not count.
"""


def family_name_of(cell: str) -> str:
    """The name of the cell without its share of returning users."""
    return re.sub(r"-r[0-9.]+$", "", cell)


def at_reuse(cell: Cell, reuse: float) -> Cell:
    """The cell with another share of returning users. Its deadline, lead time and memory stay the same."""
    if cell.reuse == reuse:
        return cell
    plan = cell.plan_name
    name = f"{family_name_of(plan)}-r{reuse:g}"
    return replace(cell, name=name, reuse=reuse, planned_as="" if name == plan else plan)


def _grid() -> tuple[Cell, ...]:
    crossed = (
        at_reuse(replace(CENTRE, name=f"n{n}-d{deadline:g}-r0.6", history=n, deadline_factor=deadline), reuse)
        for n, deadline, reuse in itertools.product((1_024, 2_048, 4_096), (1.5, 2.5, 4.0), (0.0, 0.6, 0.9))
    )
    one_at_a_time = (
        *(replace(CENTRE, name=f"lead-{factor:g}", lead_factor=factor) for factor in (0.0, 0.5, 1.0, 10.0)),
        *(replace(CENTRE, name=f"gap-{gap_s:g}", return_gap_s=gap_s) for gap_s in (2.0, 32.0)),
        *(replace(CENTRE, name=f"zipf-{zipf:g}", zipf=zipf) for zipf in (0.0, 1.0)),
        *(replace(CENTRE, name=f"candidates-{count}", candidates=count) for count in (32, 512)),
        replace(CENTRE, name="growth-0", growth=0),
        replace(CENTRE, name="bursts", burst_factor=4.0),
        replace(CENTRE, name="hot-user", hot_user_share=0.3),
    )
    return (*crossed, *one_at_a_time)


MEMORY = tuple(
    replace(
        CENTRE, name=f"dram{prefixes}-n{n}-d4-r0.9", history=n, deadline_factor=4.0, reuse=0.9, dram_prefixes=prefixes
    )
    for n, prefixes in itertools.product((2_048, 4_096), (768, 3_072))
)
"""With 4 and 16 times the DRAM: the other cells had shown that their 240 prefixes of memory limit the relay."""
GRID = (*_grid(), *MEMORY)
LOOSE = replace(
    MEMORY[0],
    name="dram768-n2048-d5-r0.9",
    deadline_factor=5.0,
    origin="chosen last, after the grid was measured: at a deadline of 4 times full inference B0 used a fourth of the "
    "device on a real broker, so figure B did not count",
)
"""No part of the grid."""
PUBLISHED = (
    replace(
        CENTRE, name="unipinrec", history=992, candidates=656, layers=12,
        origin="UniPinRec: 12 layers, 992 behaviours, 656 candidates. We do not know their width; here it is 128. They "
        "rank batches of 8 on an L40S, here requests come one by one",
    ),
    replace(
        CENTRE, name="nvidia", history=2_048, candidates=256, layers=8, heads=4, head_width=256,
        origin="NVIDIA: 8 layers, width 1,024, 4 heads of 256, up to 4,096 tokens, 256 candidates; on an L20. For an "
        "accelerator",
    ),
    replace(
        CENTRE, name="nvidia-cpu", history=512, candidates=256, layers=8, heads=4, head_width=64,
        origin="NVIDIA's cell scaled for a CPU: a quarter of its width and of its histories, all of its layers and "
        "candidates",
    ),
    replace(
        CENTRE, name="mtserve", history=10_000, candidates=512, layers=8, heads=4, head_width=128,
        origin="MTServe: 8 layers, 4 heads of 128, up to 20,000 tokens, 512 candidates. For an accelerator",
    ),
    replace(
        CENTRE, name="mtserve-cpu", history=1_250, candidates=512, layers=8, heads=4, head_width=32,
        origin="MTServe's cell scaled for a CPU: a quarter of its width, an eighth of its histories, all of its layers "
        "and candidates",
    ),
    replace(
        CENTRE, name="dlrm-v3", history=6_400, candidates=2_048, layers=5, heads=4, head_width=128, growth=70,
        origin="the sizes of MLPerf's DLRM-v3: 5 layers, 4 heads of 128, 6,400 behaviours and 70 more at each visit, "
        "2,048 candidates; no MLPerf result, its rules forbid caching across queries. For an accelerator",
    ),
    replace(
        CENTRE, name="dlrm-v3-cpu", history=1_600, candidates=512, layers=5, heads=4, head_width=32, growth=18,
        origin="the sizes of MLPerf's DLRM-v3, scaled for a CPU: a quarter of width, histories, growth and candidates; "
        "no MLPerf result",
    ),
)  # fmt: skip
"""Cells that others published."""
BY_NAME = {
    cell.name: cell
    for named in (QUICK, LOOSE, *GRID, *PUBLISHED)
    for cell in (named, *(at_reuse(named, reuse) for reuse in REUSES))
}
_FAMILIES = {cell.family for cell in GRID}
GRID_NAMES = tuple(name for name, cell in BY_NAME.items() if cell.family in _FAMILIES)
"""The grid's cells, at each share of returning users."""


def plan_name_of(cell: str) -> str:
    """The name of the plan of the cell with this name."""
    return BY_NAME[cell].plan_name if cell in BY_NAME else cell
