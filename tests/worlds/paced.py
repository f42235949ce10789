"""A worker whose null model takes the time of `LATENCY`, times the number in a file.

`python -m tests.worlds.paced FILE worker --config ...` runs `relaygr worker`. The file is read before each
forward, so that a worker becomes slow and quick again while it runs. The device thread sleeps meanwhile, as it would
wait for an accelerator.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch

from relaygr.admission.latency import LatencyModel
from relaygr.schemas.messages import LatencyCoefficients
from relaygr.worker.model.attention.paged_kv import PagedKv
from relaygr.worker.model.checkpoint import random_checkpoint
from relaygr.worker.model.interface import PrefixChunk, RankInputs
from relaygr.worker.model.null import NullRanker
from relaygr.worker.model.options import Family
from tests.worlds.relay import model_config, save_model

LATENCY: Final = LatencyCoefficients(a0=6_000, a1=90, a2=0, b0=1_000, b1=80, b2=0, c0=5_000, c1=90, c2=0, d0=100, d1=0)
"""512 tokens and 128 candidates: full inference takes 59 ms, a hit 17 ms alone and 12 ms more in a batch."""


class PacedRanker(NullRanker):
    """See the module docstring."""

    pace_file: Path
    _model = LatencyModel(LATENCY)

    def forward(
        self, kv: PagedKv, chunks: Sequence[PrefixChunk], requests: Sequence[RankInputs]
    ) -> torch.Tensor | None:
        sizes = [(each.prefix_tokens, each.num_candidates) for each in requests]
        device_us = self._model.batch_us(sizes)
        device_us += sum(self._model.append_us(chunk.start, chunk.end - chunk.start) for chunk in chunks)
        time.sleep(device_us / 1e6 * read_pace(self.pace_file))
        return super().forward(kv, chunks, requests)


def make_paced_model(folder: Path) -> Path:
    """A null model with a calibration that says `LATENCY`."""
    config = model_config().model_copy(update={"family": Family.NULL})
    return save_model(folder, config, random_checkpoint(config, seed=0).tensors, LATENCY)


def read_pace(file: Path) -> float:
    """How many times longer the device takes than `LATENCY` says; 1 without a file, or while it is being written."""
    try:
        return float(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return 1.0


def set_pace(file: Path, factor: float) -> None:
    """The worker with this file takes so many times longer from now on."""
    file.write_text(f"{factor:g}", encoding="utf-8")


def main() -> None:
    """Runs the command with the paced model."""
    from relaygr.cli.__main__ import main as run_command
    from relaygr.worker.model import engine

    PacedRanker.pace_file = Path(sys.argv.pop(1))
    engine.NullRanker = PacedRanker  # type: ignore[misc]
    run_command()


if __name__ == "__main__":
    main()
