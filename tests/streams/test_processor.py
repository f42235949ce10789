"""The processor of this machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from relaygr.runtime.processor import instruction_sets, processor_name


def test_it_has_a_name_and_the_number_of_cores() -> None:
    name, _, cores = processor_name().rpartition(", ")
    assert name and cores == f"{os.cpu_count()} cores"


def test_a_system_that_hides_its_processor_is_named_by_its_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    def hidden(path: Path, *_: object, **__: object) -> None:
        raise PermissionError(path)

    monkeypatch.setattr(Path, "open", hidden)
    monkeypatch.setattr("platform.processor", lambda: "")
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    assert processor_name() == f"riscv64, {os.cpu_count()} cores"


def test_instruction_sets_have_the_names_that_linux_gives_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = tmp_path / "cpuinfo"
    told.write_text("processor\t: 0\nmodel name\t: A Processor\nflags\t\t: fpu avx2 fma avx512f\n")
    monkeypatch.setattr("relaygr.runtime.processor.Path", lambda _: told)
    assert instruction_sets() == {"fpu", "avx2", "fma", "avx512f"}
    told.write_text("processor : 0\nFeatures : fp asimd\n")
    assert instruction_sets() == frozenset()
