"""A process that is killed at a random moment while it fills and evicts its arena."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.worlds.cache import make_key
from tests.worlds.invariants import check_invariants
from tests.worlds.shared import SharedWorld, holds

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
BUSY = """
import random, sys
from pathlib import Path
from tests.worlds.cache import make_key
from tests.worlds.shared import SharedWorld
world = SharedWorld(Path(sys.argv[1]))
random.seed(int(sys.argv[2]))
for round in range(10**9):
    if round == 3:
        print("busy", flush=True)
    key = make_key(f"user-{random.randrange(40)}", random.randrange(1, 200))
    if world.cache.peek(key).hbm_behaviours < key.length:
        world.store(key)
    world.cache.transfers.spill(key)
    world.mover.run()
"""


@pytest.mark.parametrize("seed", range(3))
def test_after_a_real_kill_every_restored_prefix_is_complete(tmp_path: Path, seed: int) -> None:
    shown = 0
    moments = random.Random(seed)
    for life in range(2):
        command = [sys.executable, "-c", BUSY, str(tmp_path), str(10 * seed + life)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        assert process.stdout is not None
        while process.stdout.readline().strip() != "busy":
            assert process.poll() is None, "it ended by itself"
        time.sleep(moments.uniform(0.05, 0.4))
        process.kill()
        process.wait()
        world = SharedWorld(tmp_path)
        for entry in world.restored:
            key = make_key(entry.key.user_id, entry.key.length)
            assert key.chain.digest == entry.key.chain.digest
            assert holds(entry, key, world.shared.tensor.numpy().view(np.int64))
            world.shared.journal.verify(entry.pages)
        check_invariants(world.cache)
        shown += len(world.restored)
        world.die()
    assert shown
