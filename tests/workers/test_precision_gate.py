"""The gate in front of everything inexact: K,V in 8 bits, products in int8, and a DRAM tier in int8."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs
from typer.testing import CliRunner

from relaygr.cli.app import app
from relaygr.runtime.errors import RelayError
from relaygr.worker.kv import KvDtype
from relaygr.worker.model.checkpoint import random_checkpoint, save_checkpoint
from relaygr.worker.model.engine import load_engine
from relaygr.worker.model.interface import Engine, RankInputs, RankOutputs
from relaygr.worker.model.options import ComputeDtype
from relaygr.worker.process.reloading import ReloadOutcome, ReloadRefusedError, load_beside
from relaygr.worker.process.trial import require_precisions
from relaygr.worker.settings import WorkerSettings
from tests.workers.engine_kinds import HAS_ONEDNN
from tests.worlds.model import small_config

pytestmark = pytest.mark.usefixtures("exact_int8")
PAGE_TOKENS = 16


@dataclass(frozen=True)
class Inexact:
    """One of the settings that make scores inexact."""

    part: str
    """Of the names of its limits, and of its old command."""
    setting: str
    dtype: str
    event: str
    remedy: str
    said: str
    max_error: float = 0.2
    """Limits that the model of these tests meets."""
    min_overlap: float = 0.5

    @property
    def option(self) -> str:
        return f"--{self.setting.replace('_', '-')}"

    def engine(self, model: Path) -> Engine:
        kv = KvDtype(self.dtype) if self.part == "kv" else KvDtype.FLOAT32
        compute = ComputeDtype.INT8 if self.part == "compute" else ComputeDtype.FLOAT32
        return load_engine(model, "cpu", kv, PAGE_TOKENS, compute_dtype=compute)

    def settings(self, model: Path, max_error: float, min_overlap: float, **more: Any) -> WorkerSettings:
        # No worker may have an overlap above 1: only such a limit refuses by the overlap alone.
        limits = {f"{self.part}_max_score_error": max_error, f"{self.part}_min_topk_overlap": min_overlap}
        own = {self.setting: self.dtype, **more}
        return WorkerSettings(model=model, page_tokens=PAGE_TOKENS, device="cpu", **own).model_copy(update=limits)


DRAM = Inexact(
    "dram", "dram_kv_dtype", "int8", "scores on reloaded prefixes",
    r"int8 is too inexact for this model.*bfloat16 or same.*model check .* --dram-kv-dtype int8",
    "2.55 times as many",
    max_error=0.02, min_overlap=0.8,
)  # fmt: skip
COMPUTE = Inexact(
    "compute", "compute_dtype", "int8", "scores by products",
    r"compute_dtype int8 is too inexact.*to float32.*model check .* --compute-dtype int8",
    "products in int8, compared with float32",
)  # fmt: skip
KV = [
    Inexact(
        "kv", "kv_dtype", dtype.value, "scores on K,V",
        rf"kv_dtype {dtype.value} is too inexact.*kv_dtype to float32.*model check .* --kv-dtype {dtype.value}",
        f"K,V {dtype.value}, compared with float32",
    )
    for dtype in KvDtype
    if dtype.is_scaled
]  # fmt: skip
NO_ONEDNN = pytest.mark.skipif(not HAS_ONEDNN, reason="this build of torch has no oneDNN")
each_part = pytest.mark.parametrize(
    "part", [DRAM, pytest.param(COMPUTE, marks=NO_ONEDNN), *KV], ids=lambda part: f"{part.part} {part.dtype}"
)


def save(folder: Path, seed: int) -> Path:
    config = small_config()
    save_checkpoint(folder, config, random_checkpoint(config, seed).tensors)
    return folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save(tmp_path, seed=0)


@each_part
def test_a_model_within_the_limits_starts_and_its_error_is_told(model: Path, part: Inexact) -> None:
    with capture_logs() as logs:
        require_precisions(part.engine(model), part.settings(model, part.max_error, part.min_overlap))
    [told] = [entry for entry in logs if part.event in entry["event"]]
    assert told[part.setting] == part.dtype and 0 < told["max_score_error"] <= part.max_error


@each_part
@pytest.mark.parametrize(("max_error", "min_overlap"), [(1e-6, 0.5), (None, 1.1)])
def test_a_model_beyond_the_limits_is_refused_with_a_remedy(
    model: Path, part: Inexact, max_error: float | None, min_overlap: float
) -> None:
    max_error = part.max_error if max_error is None else max_error
    with pytest.raises(RelayError, match=part.remedy):
        require_precisions(part.engine(model), part.settings(model, max_error, min_overlap))


@each_part
def test_a_reloaded_model_is_checked_too(model: Path, part: Inexact) -> None:
    present = part.engine(model)
    save(model, seed=1)
    with pytest.raises(ReloadRefusedError, match="too inexact for this model") as refused:
        load_beside(present, part.settings(model, 1e-9, 0.5))
    assert refused.value.outcome is ReloadOutcome.UNFIT


@pytest.mark.slow
@each_part
def test_the_command_tells_the_error_and_exits_with_1_beyond_the_limits(model: Path, part: Inexact) -> None:
    arguments = ["model", "check", str(model), "--device", "cpu", "--minutes", "0.05", part.option, part.dtype]
    limits = ["--max-score-error", str(part.max_error), "--min-topk-overlap", str(part.min_overlap)]
    within = CliRunner().invoke(app, [*arguments, *limits])
    assert within.exit_code == 0, within.output
    assert part.said in within.output and f"({part.max_error:.4%} at most)" in within.output
    beyond = CliRunner().invoke(app, [*arguments, "--max-score-error", "0"])
    assert beyond.exit_code == 1
    assert f"{model} can be served, but not with worker.{part.setting} {part.dtype}" in beyond.output


@each_part
def test_an_old_name_measures_the_same_and_names_the_new_command(model: Path, part: Inexact) -> None:
    own = [] if part.part == "dram" else [part.option, part.dtype]
    arguments = ["model", f"check-{part.part}", str(model), "--device", "cpu", "--json", *own, "--max-score-error"]
    done = CliRunner().invoke(app, [*arguments, str(part.max_error), "--min-topk-overlap", str(part.min_overlap)])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found[part.setting] == part.dtype and 0 < found["max_score_error"] <= part.max_error
    assert f"use `relaygr model check {model} {part.option} {part.dtype}`" in done.stderr
    assert CliRunner().invoke(app, [*arguments, "0"]).exit_code == 1


@pytest.mark.parametrize(
    ("kv_dtype", "exact"),
    [
        (KvDtype.BFLOAT16, {"dram_kv_dtype": "bfloat16"}),
        (KvDtype.FLOAT32, {"dram_kv_dtype": "int8", "dram_bytes": 0}),
    ],
    ids=["exact", "without a DRAM tier"],
)
def test_what_is_exact_or_absent_is_not_measured(model: Path, kv_dtype: KvDtype, exact: dict[str, Any]) -> None:
    none = {f"{part}_max_score_error": 0.0 for part in ("dram", "kv", "compute")}
    settings = WorkerSettings(model=model, page_tokens=PAGE_TOKENS, device="cpu", **exact).model_copy(update=none)
    with capture_logs() as logs:
        require_precisions(load_engine(model, "cpu", kv_dtype, PAGE_TOKENS), settings)
    assert not [entry for entry in logs if "scores" in entry["event"]]


def test_scores_that_are_not_numbers_are_beyond_the_limits(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, calls = DRAM.engine(model), []
    rank = engine.rank

    def once_not_a_number(batch: Sequence[RankInputs]) -> list[RankOutputs]:
        outputs = rank(batch)
        calls.append(outputs)
        return [RankOutputs(each.scores * np.nan) for each in outputs] if len(calls) == 4 else outputs

    monkeypatch.setattr(engine, "rank", once_not_a_number)
    with pytest.raises(RelayError, match="too inexact for this model"):
        require_precisions(engine, DRAM.settings(model, 1e9, 0.01))
