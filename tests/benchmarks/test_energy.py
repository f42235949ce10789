"""The energy counters of the processors."""

from __future__ import annotations

import math
from pathlib import Path

from relaygr.bench.energy import read_energy_uj, used_j


def package(folder: Path, number: int, energy_uj: int) -> None:
    path = folder / f"intel-rapl:{number}"
    path.mkdir(exist_ok=True)
    (path / "energy_uj").write_text(f"{energy_uj}\n")
    (path / "max_energy_range_uj").write_text("10000000\n")


def test_the_packages_of_a_machine_are_added_and_a_counter_may_begin_again(tmp_path: Path) -> None:
    package(tmp_path, 0, 1_000_000)
    package(tmp_path, 1, 9_000_000)
    (tmp_path / "intel-rapl:0:0").mkdir()
    before = read_energy_uj(tmp_path)
    package(tmp_path, 0, 3_500_000)
    package(tmp_path, 1, 500_000)
    assert used_j(before, read_energy_uj(tmp_path)) == 4.0


def test_a_machine_without_counters_has_no_energy(tmp_path: Path) -> None:
    assert read_energy_uj(tmp_path / "absent") == {}
    assert math.isnan(used_j({}, {}))
