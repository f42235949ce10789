"""What a worker says it will hold."""

from __future__ import annotations

import psutil
import pytest

from streams.errors import RelayError
from workers.memory import MemoryPlan, process_bytes, require_host_memory

MIB = 1 << 20


def plan(dram_bytes: int) -> MemoryPlan:
    return MemoryPlan(MIB, MIB, MIB, dram_bytes, MIB, MIB, 300 * MIB)


def test_what_interpreter_and_libraries_take_is_part_of_the_statement():
    assert plan(0).by_kind()["process"] == 300 * MIB
    assert plan(0).total_bytes == 305 * MIB
    resident = psutil.Process().memory_info().rss
    assert process_bytes(0) > resident // 2
    assert process_bytes(1 << 50) == 0


def test_a_plan_that_the_host_cannot_hold_is_refused_with_what_to_lower():
    require_host_memory(plan(0), device_is_host=True)
    with pytest.raises(RelayError, match=r"worker\.dram_bytes"):
        require_host_memory(plan(1 << 50), device_is_host=True)
