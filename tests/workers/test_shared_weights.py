"""The weights of an active worker and of its standby share one copy in memory."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from relaygr.schemas.messages import Behaviours
from relaygr.worker.measuring import bind_own_arena
from relaygr.worker.model.checkpoint import random_checkpoint, save_checkpoint
from relaygr.worker.model.engine import load_engine
from relaygr.worker.model.interface import PrefixChunk
from tests.worlds.model import small_config


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/smaps")
def test_weights_on_the_cpu_are_the_pages_of_the_checkpoint_file(tmp_path: Path) -> None:
    """Processes that map one file share its pages unless they write to them, so serving must not write."""
    config = small_config(vocabulary_size=50_000)
    checkpoint = save_checkpoint(tmp_path, config, random_checkpoint(config, seed=0).tensors)
    engine = load_engine(tmp_path, "cpu")
    bind_own_arena(engine)
    contextual = np.zeros(engine.layout.contextual_tokens, np.int64)
    count = 8
    behaviours = Behaviours(
        np.arange(count, dtype=np.int64), np.zeros(count, np.uint16), np.arange(count, dtype=np.int64)
    )
    inputs = engine.prefix_inputs(contextual, behaviours)
    pages = np.arange(engine.geometry.pages_for(inputs.tokens), dtype=np.int32)
    engine.pre_infer(PrefixChunk(inputs, 0, inputs.tokens, pages))
    mapped = mapping_kib(tmp_path / "model.safetensors")
    assert mapped["Size"] * 1024 >= checkpoint.weights_bytes
    assert mapped["Anonymous"] == 0


def mapping_kib(path: Path) -> dict[str, int]:
    """Totals over this process's mappings of a file, by the names of smaps."""
    totals: dict[str, int] = {}
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split(" ", 1)[0]
        if not first.endswith(":"):
            inside = line.endswith(str(path))
        elif inside and line.endswith(" kB"):
            name = first.removesuffix(":")
            totals[name] = totals.get(name, 0) + int(line.split()[1])
    return totals
