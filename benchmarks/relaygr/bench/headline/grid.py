"""The cells: what is asked of the systems. They were committed before anything was measured.

Times are factors of what the engine alone takes on the machine, so that a cell asks the same of a CPU and of an
accelerator. `plan.py` turns them into milliseconds, and the report prints both.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

from relaygr.worker.model.config import ModelConfig

ITEMS = 10_000
PAGE_TOKENS = 64
LENGTH_FACTORS = (1 / 8, 4)
"""The shortest and the longest history of figure A, as factors of the cell's median."""
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

    @property
    def longest_history(self) -> int:
        """The longest history of any run, growth and spread included."""
        return int(self.history * LENGTH_FACTORS[1] * 2)

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
            num_positions=self.longest_history + self.suffix + 1,
            max_prefix_behaviours=self.longest_history,
            max_suffix_behaviours=self.suffix,
            max_candidates=self.candidates,
        )


CENTRE = Cell("centre", history=2_048, deadline_factor=2.5, lead_factor=3.0, reuse=0.6)
QUICK = replace(CENTRE, name="quick", return_gap_s=3.0)
"""The one cell of `--quick`. Its runs are short, so its users return sooner."""


def _grid() -> tuple[Cell, ...]:
    crossed = (
        replace(CENTRE, name=f"n{n}-d{deadline:g}-r{reuse:g}", history=n, deadline_factor=deadline, reuse=reuse)
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


GRID = _grid()
BY_NAME = {cell.name: cell for cell in (QUICK, *GRID)}
