"""The engine's benchmark: every point of every variant is measured, and a device's time is counted once."""

from __future__ import annotations

import csv
from dataclasses import asdict, fields
from pathlib import Path

import pytest

from relaygr.bench.engine import run, shapes
from relaygr.bench.engine.run import EngineStage, EngineVariant, Figure, SideBySide, Sizes
from relaygr.bench.engine.shapes import Shape
from relaygr.bench.rows import append_rows
from relaygr.worker.device import CpuDevice
from relaygr.worker.kv import KvDtype
from relaygr.worker.model.options import ComputeDtype

SIZES = Sizes(prefixes=(64, 128), candidates=(4, 8), appends=(16,), batches=(2,))


@pytest.mark.slow
def test_every_point_of_every_variant_has_a_figure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(run, "SHAPES", {"tiny": Shape(16, 1, 2, 8, 8)})
    monkeypatch.setattr(run, "matrix_peak_gflops", lambda dtype, device: 100.0)
    variants = [
        EngineVariant(ComputeDtype.FLOAT32, KvDtype.FLOAT32),
        EngineVariant(ComputeDtype.FLOAT32, KvDtype.FLOAT32, graphs=True),
    ]
    bench, steps = SideBySide("tiny", variants, SIZES, CpuDevice()), list[str]()
    bench.run(2, steps.append)
    figures = bench.figures()
    assert len(steps) == 3 * 2
    for variant in variants:
        own = [figure for figure in figures if figure.variant == variant.name]
        counts = {stage: sum(figure.stage == stage for figure in own) for stage in EngineStage}
        assert counts == {
            EngineStage.PRE_INFER: 2,
            EngineStage.HIT: 4 + 2,
            EngineStage.RESTED_HIT: 4,
            EngineStage.FULL: 4,
            EngineStage.APPEND: 1,
        }
    assert all(figure.rounds == 2 and figure.median_us >= figure.least_us > 0 for figure in figures)
    for _ in range(2):
        append_rows(tmp_path / "new" / "results.csv", [asdict(figure) for figure in figures])
    with (tmp_path / "new" / "results.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * len(figures)
    assert set(rows[0]) == {field.name for field in fields(Figure)}


def test_flops_of_a_prefix_do_not_depend_on_its_chunks() -> None:
    config = Shape(16, 3, 2, 8, 4).config(1000, 4)
    whole = shapes.append_flops(config, 0, 1000)
    assert shapes.append_flops(config, 0, 300) + shapes.append_flops(config, 300, 700) == pytest.approx(whole)
