"""The memory plan and its comparison with the host's memory."""

from __future__ import annotations

import pytest

from relaygr.runtime.errors import RelayError
from relaygr.runtime.limits import Memory
from relaygr.worker import memory as memory_module
from relaygr.worker.memory import MemoryPlan, require_host_memory

GIB = 2**30
KINDS = ("weights", "hbm", "scratch", "dram", "queues", "history", "process", "products")


@pytest.fixture(autouse=True)
def ten_gib_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_module, "available_memory", lambda: Memory(10 * GIB, 64 * GIB))


def plan(**gib: float) -> MemoryPlan:
    kinds = dict.fromkeys(KINDS, 0.0) | gib
    return MemoryPlan(**{f"{kind}_bytes": int(size * GIB) for kind, size in kinds.items()})


def test_the_total_is_the_sum_of_the_kinds() -> None:
    memory = plan(**{kind: place + 1 for place, kind in enumerate(KINDS)})
    assert memory.total_bytes == 36 * GIB
    assert memory.by_kind() == {kind: (place + 1) * GIB for place, kind in enumerate(KINDS)}


def test_a_tenth_of_the_free_memory_is_not_planned() -> None:
    require_host_memory(plan(dram=9), device_is_host=True)
    with pytest.raises(RelayError, match=r"9\.10 GiB .* 9\.00 GiB"):
        require_host_memory(plan(dram=9.1), device_is_host=True)


def test_on_the_cpu_hbm_is_host_memory_too() -> None:
    with pytest.raises(RelayError, match=r"worker\.hbm_bytes"):
        require_host_memory(plan(hbm=8, dram=2), device_is_host=True)
    require_host_memory(plan(hbm=80, dram=2), device_is_host=False)


def test_compiled_products_are_memory_of_a_cpu_only() -> None:
    with pytest.raises(RelayError, match=r"9\.50 GiB .* 9\.00 GiB"):
        require_host_memory(plan(hbm=8, products=1.5), device_is_host=True)
    require_host_memory(plan(dram=8, products=1.5), device_is_host=False)


def test_the_history_file_and_the_process_are_not_required_again() -> None:
    require_host_memory(plan(history=1000, process=1000), device_is_host=True)


def test_an_arena_that_an_earlier_process_made_is_not_counted_twice() -> None:
    """Memory on tmpfs is no longer free, and is not allocated again."""
    require_host_memory(plan(dram=20, queues=1), device_is_host=True, taken_bytes=20 * GIB)
    with pytest.raises(RelayError, match=r"16\.00 GiB .* 9\.00 GiB"):
        require_host_memory(plan(dram=20), device_is_host=True, taken_bytes=4 * GIB)
