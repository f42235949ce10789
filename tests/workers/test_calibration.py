"""Calibration: the known speed of a device is measured, and the file of another machine is refused."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs
from typer.testing import CliRunner

from relaygr.admission.latency import LatencyModel
from relaygr.cli.app import app
from relaygr.machine import Cores, CoreWatch
from relaygr.runtime.errors import RelayError
from relaygr.schemas.messages import LatencyCoefficients
from relaygr.worker.calibration import (
    FIT_ERROR_BOUND,
    Calibration,
    calibrate,
    describe,
    latency_for,
    load_calibration,
    save_calibration,
)
from relaygr.worker.device import CpuDevice, Device
from relaygr.worker.kv import KvDtype
from relaygr.worker.measuring import SUFFIX_BEHAVIOURS, EngineMeter, bind_own_arena, rest_between_requests
from relaygr.worker.model import layer_parts
from relaygr.worker.model.checkpoint import random_checkpoint, save_checkpoint
from relaygr.worker.model.description import description_of
from relaygr.worker.model.engine import build_engine
from relaygr.worker.model.inputs.known import KnownInputs
from relaygr.worker.model.interface import PrefixChunk, RankInputs, RankOutputs
from relaygr.worker.model.layer_parts import onednn_is_faster
from relaygr.worker.model.null import NullRanker
from relaygr.worker.model.options import ComputeDtype, Family
from relaygr.worker.model.ranker_engine import RankerEngine
from relaygr.worker.process.prepare import _compute_as_calibrated
from tests.workers.engine_kinds import HAS_ONEDNN
from tests.worlds.model import make_world, small_config

pytestmark = pytest.mark.slow

KNOWN = LatencyCoefficients(0.0, 0.0, 0.0, 90.0, 2.0, 0.001, 300.0, 0.5, 0.002, 0.0, 0.0)
SHARED_US = 200.0


class TimedEngine(RankerEngine):
    """Each call takes the time that a latency model predicts, on a clock of its own."""

    def __init__(self, max_prefix: int = 4096) -> None:
        config = small_config(family=Family.NULL, max_prefix_behaviours=max_prefix, max_candidates=512)
        described = description_of(config)
        super().__init__(
            NullRanker(config),
            described,
            "revision",
            KnownInputs.of(config),
            0,
            CpuDevice(),
            described.geometry(64, KvDtype.FLOAT32),
            ComputeDtype.FLOAT32,
        )
        bind_own_arena(self)
        self.now_ns = 0
        self.longest = self.rests = 0
        self.suffix = min(SUFFIX_BEHAVIOURS, self.limits.max_suffix_behaviours)
        self._model = LatencyModel(KNOWN, SHARED_US)

    def pre_infer(self, chunk: PrefixChunk) -> None:
        super().pre_infer(chunk)
        self.longest = max(self.longest, chunk.end)
        self.now_ns += int(self._model.append_us(chunk.start, chunk.end - chunk.start) * 1000)

    def rank(self, batch: Sequence[RankInputs]) -> list[RankOutputs]:
        sizes = [(request.prefix_tokens, self.suffix + request.num_candidates) for request in batch]
        self.now_ns += int(self._model.batch_us(sizes) * 1000)
        return super().rank(batch)

    def read_clock(self) -> int:
        self.now_ns += 1
        return self.now_ns

    def rest(self) -> None:
        self.rests += 1


@pytest.fixture(scope="module")
def timed() -> Calibration:
    torch.set_num_threads(1)  # A fixture of a module runs before those of a test.
    engine = TimedEngine()
    return calibrate(engine, budget_s=60.0, timer_ns=engine.read_clock, rest=engine.rest)


def test_a_device_of_known_speed_is_measured_as_it_is(timed: Calibration) -> None:
    for name in ("b0", "b1", "b2", "c0", "c1", "c2"):
        assert getattr(timed.coefficients, name) == pytest.approx(getattr(KNOWN, name), rel=0.01), name


class Stalling(TimedEngine):
    """The first pass and every seventeenth pass take long."""

    def __init__(self) -> None:
        super().__init__(max_prefix=1024)
        self._passes = 0

    def pre_infer(self, chunk: PrefixChunk) -> None:
        super().pre_infer(chunk)
        self.now_ns += 10**9 if self._passes == 0 else 10**7 if self._passes % 17 == 0 else 0
        self._passes += 1


def test_a_slow_first_pass_and_stalls_do_not_change_the_result() -> None:
    engine = Stalling()
    measured = calibrate(engine, budget_s=60.0, timer_ns=engine.read_clock, rest=engine.rest)
    for name in ("b0", "b1"):
        assert getattr(measured.coefficients, name) == pytest.approx(getattr(KNOWN, name), rel=0.01), name
    assert max(point.duration_us for point in measured.append) < 10**4
    engine = Stalling()
    hasty = calibrate(engine, budget_s=1.001, timer_ns=engine.read_clock, rest=engine.rest)
    assert max(point.duration_us for point in hasty.append) < 10**4, "each was measured once, after the first pass"


def test_tails_of_grown_prefixes_are_measured_and_every_pass_that_a_request_begins_is_after_a_pause() -> None:
    engine = TimedEngine(max_prefix=512)
    measured = calibrate(engine, budget_s=60.0, timer_ns=engine.read_clock, rest=engine.rest)
    tails = {(point.cached_tokens, point.new_tokens) for point in measured.append if point.new_tokens < 64}
    assert tails == {(tokens - tail, tail) for tokens in (64, 128, 256, 512) for tail in (8, 32)}
    lengths, rounds, warm_up = 4, 9, 1
    each, batches = 1 + 2 + 3, 3
    assert engine.rests == (lengths * rounds + warm_up) * each + batches * rounds + warm_up, (
        "one prefix, two tails, three rankings, and a batch where the arena has room for two such prefixes"
    )


def test_a_rest_reads_more_than_a_core_caches_but_takes_nothing_beside_an_accelerator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read: list[int] = []
    monkeypatch.setattr(torch.Tensor, "sum", lambda data: read.append(data.nbytes))
    rest_between_requests(CpuDevice())()
    rest_between_requests(cast(Device, SimpleNamespace(is_cpu=False)))()
    assert read == [128 << 20, 0]


def test_what_the_requests_of_a_batch_share_is_measured(timed: Calibration) -> None:
    assert {(point.prefix_tokens, point.requests) for point in timed.batch} == {
        (64, 8), (128, 8), (256, 8), (512, 8), (1024, 4), (2048, 2)
    }  # fmt: skip
    assert timed.model.shared_us == pytest.approx(SHARED_US, rel=0.01)


@pytest.mark.parametrize("choice", [True, False])
@pytest.mark.skipif(not HAS_ONEDNN, reason="this build of torch has no oneDNN")
def test_a_standby_leaves_the_products_to_the_library_that_was_calibrated(
    choice: bool, timed: Calibration, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each process measures for itself otherwise, and two measurements may disagree."""
    monkeypatch.setattr(layer_parts._Choice, "uses_onednn", not choice)
    _compute_as_calibrated(tmp_path / "missing.json")
    assert onednn_is_faster() is not choice
    path = tmp_path / "calibration.json"
    save_calibration(replace(timed, machine=replace(timed.machine, uses_onednn=choice)), path)
    _compute_as_calibrated(path)
    assert onednn_is_faster() is choice and describe(TimedEngine()).uses_onednn is choice


def test_full_inference_is_its_chunks_and_its_ranking(timed: Calibration) -> None:
    hits = {(point.prefix_tokens, point.scored_tokens): point.duration_us for point in timed.hit}
    longest = max(timed.full, key=lambda point: (point.prefix_tokens, point.scored_tokens))
    assert longest.prefix_tokens == 4096
    whole = LatencyModel(KNOWN).pre_us(4096)
    hit = hits[longest.prefix_tokens, longest.scored_tokens]
    assert whole < longest.duration_us - hit < whole * 1.3


class SlowAtFirst(TimedEngine):
    """Like captured graphs: of each size the first pass runs directly, the second is captured, later ones replay."""

    passes_to_warm = 2

    def __init__(self) -> None:
        super().__init__(max_prefix=1024)
        self._seen: Counter[tuple[int, ...]] = Counter()

    def _slow(self, *size: int) -> None:
        self._seen[size] += 1
        self.now_ns += 50_000_000 if self._seen[size] <= 2 else 0

    def pre_infer(self, chunk: PrefixChunk) -> None:
        super().pre_infer(chunk)
        self._slow(chunk.start, chunk.end)

    def rank(self, batch: Sequence[RankInputs]) -> list[RankOutputs]:
        self._slow(batch[0].prefix_tokens, -batch[0].num_candidates)
        return super().rank(batch)


def test_passes_that_capture_a_graph_are_not_measured() -> None:
    engine = SlowAtFirst()
    measured = calibrate(engine, budget_s=60.0, timer_ns=engine.read_clock, rest=engine.rest).coefficients
    for name in ("b0", "b1", "c0", "c1"):
        assert getattr(measured, name) == pytest.approx(getattr(KNOWN, name), rel=0.05), name


def test_a_page_larger_than_the_largest_copy_is_measured_in_enough_sizes() -> None:
    """Only two sizes were measured, too few for the fit, and the worker failed at its start."""
    engine = TimedEngine(max_prefix=256)
    below_a_page = (engine.geometry.page_bytes // 4, engine.geometry.page_bytes // 2)
    assert len({point.size_bytes for point in EngineMeter(engine).reloads(below_a_page)}) == 3


def test_a_short_budget_leaves_the_long_prefixes_out() -> None:
    engine = TimedEngine(max_prefix=65_536)
    calibrate(engine, budget_s=0.05, timer_ns=engine.read_clock, rest=engine.rest)
    assert 64 <= engine.longest < 65_536
    assert engine.now_ns < 0.1e9


def test_slow_rests_leave_no_prefixes_out_and_follow_one_round_only() -> None:
    quick, slow = TimedEngine(max_prefix=65_536), TimedEngine(max_prefix=65_536)

    def slow_rest() -> None:
        slow.rest()
        slow.now_ns += 20_000_000

    for engine, rest in ((quick, quick.rest), (slow, slow_rest)):
        calibrate(engine, budget_s=0.5, timer_ns=engine.read_clock, rest=rest)
    lengths, of_a_length, warm_up = (slow.longest // 64).bit_length(), 7, 1
    assert slow.longest == quick.longest > 512
    assert slow.rests == (lengths + warm_up) * of_a_length < quick.rests


def test_progress_rises_to_the_whole() -> None:
    engine = TimedEngine(max_prefix=256)
    seen: list[float] = []
    calibrate(engine, 1.0, lambda share, _text: seen.append(share), engine.read_clock, engine.rest)
    assert seen == sorted(seen)
    assert seen[-1] == 1.0


@pytest.mark.parametrize("dtype", [KvDtype.FLOAT32, KvDtype.INT8])
def test_a_real_engine_is_calibrated_in_a_moment(dtype: KvDtype) -> None:
    # Pages of a real size: reloads copy megabytes, page by page.
    world = make_world(small_config(), dtype=dtype, page_tokens=64)
    model = calibrate(world.engine, budget_s=0.1).model
    assert model.full_us(200, 32) > 0
    assert model.hit_us(200, 32) > 0
    assert model.reload_us(2**20) > 0


def test_a_calibration_is_read_back_as_it_was_written(timed: Calibration, tmp_path: Path) -> None:
    path = tmp_path / "folder" / "calibration.json"
    save_calibration(timed, path)
    assert load_calibration(path) == timed
    assert [file.name for file in path.parent.iterdir()] == ["calibration.json"]
    assert latency_for(TimedEngine(), path).coefficients == timed.coefficients


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_revision", "ff"),
        ("device", "cuda:0"),
        ("threads", 99),
        ("page_tokens", 8),
        ("kv_dtype", KvDtype.BFLOAT16),
        ("compute_dtype", ComputeDtype.BFLOAT16),
        ("backend", "triton from graphs"),
        # Each process of a run measures it, so its value must not be a part of the test's name.
        pytest.param("uses_onednn", not onednn_is_faster(), id="uses_onednn"),
    ],
)
def test_a_calibration_of_something_else_is_refused(
    field: str, value: object, timed: Calibration, tmp_path: Path
) -> None:
    path = tmp_path / "calibration.json"
    save_calibration(replace(timed, machine=replace(timed.machine, **{field: value})), path)  # type: ignore[arg-type]
    with pytest.raises(RelayError, match=f"measured with {field} {value}"):
        latency_for(TimedEngine(), path)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"format": 1, "calibration": {}}', '{"format": 1, "calibration": {"coefficients": {"a0": -1}}}'],
)
def test_a_file_that_is_not_a_calibration_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    path.write_text(text)
    with pytest.raises(RelayError, match="is not a calibration"):
        load_calibration(path)


def test_a_negative_time_or_another_format_is_refused(timed: Calibration, tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    save_calibration(timed, path)
    written = json.loads(path.read_text())
    written["calibration"]["coefficients"]["b1"] = -1.0
    path.write_text(json.dumps(written))
    with pytest.raises(RelayError, match="b1 is -1"):
        load_calibration(path)
    path.write_text(json.dumps(written | {"format": 2}))
    with pytest.raises(RelayError, match="calibration format 2"):
        load_calibration(path)
    with pytest.raises(RelayError, match="relaygr calibrate"):
        load_calibration(tmp_path / "none.json")


def test_a_fit_that_is_off_is_measured_again_for_longer(
    timed: Calibration, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config()
    save_checkpoint(tmp_path / "model", config, random_checkpoint(config, 0).tensors)
    results, budgets = iter([disturbed(timed, 5.0), timed]), []

    def measure(_engine: object, budget_s: float, _progress: object) -> Calibration:
        budgets.append(budget_s)
        return next(results)

    monkeypatch.setattr("relaygr.worker.calibration.calibrate", measure)
    out = tmp_path / "calibration.json"
    done = CliRunner().invoke(
        app, ["calibrate", "--model", str(tmp_path / "model"), "--out", str(out), "--budget-s", "2"]
    )
    assert done.exit_code == 0 and budgets == [2.0, 8.0]
    assert load_calibration(out) == timed


def test_the_command_measures_and_writes_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Whatever else the machine does.
    monkeypatch.setattr("relaygr.worker.calibration.FIT_ERROR_BOUND", math.inf)
    config = small_config()
    save_checkpoint(tmp_path / "model", config, random_checkpoint(config, 0).tensors)
    out = tmp_path / "calibration.json"
    arguments = ["calibrate", "--model", str(tmp_path / "model"), "--budget-s", "0.1", "--device", "cpu"]
    done = CliRunner().invoke(app, [*arguments, "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert "T_full" in done.output and "times as long." in done.output
    machine = load_calibration(out).machine
    assert machine.model_revision == random_checkpoint(config, 0).revision
    assert (machine.device, machine.threads, machine.torch_version) == ("cpu", 1, torch.__version__)


def disturbed(calibration: Calibration, times_as_long: float) -> Calibration:
    """As if every third ranking on a cached prefix had been held up."""
    hit = [
        replace(point, duration_us=point.duration_us * (times_as_long if at % 3 == 0 else 1))
        for at, point in enumerate(calibration.hit)
    ]
    return replace(calibration, hit=tuple(hit))


@pytest.mark.parametrize("times_as_long", [0.4, 2.5, 60.0])
def test_fits_of_a_device_that_was_held_up_are_known_to_be_off(timed: Calibration, times_as_long: float) -> None:
    assert timed.fit_problem is None and max(timed.fit_errors.values()) < 0.1
    held_up = disturbed(timed, times_as_long)
    assert held_up.fit_errors["T_full"] < 0.1 < FIT_ERROR_BOUND < held_up.fit_errors["T_hit"]
    assert held_up.fit_problem is not None and "the fitted T_hit is " in held_up.fit_problem
    assert disturbed(timed, 1.2).fit_problem is None


def test_a_time_that_is_none_is_a_bad_fit_and_no_measurement_is_no_problem(timed: Calibration) -> None:
    """A file may have been edited."""
    assert disturbed(timed, 0.0).fit_errors["T_hit"] == math.inf
    assert replace(timed, full=(), append=(), hit=()).fit_problem is None


@pytest.mark.parametrize(("foreign", "is_said"), [(0.9, False), (1.4, True)])
def test_a_calibration_that_is_far_off_is_shown_and_replaces_no_good_one(
    timed: Calibration, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, foreign: float, is_said: bool
) -> None:
    config = small_config()
    save_checkpoint(tmp_path / "model", config, random_checkpoint(config, 0).tensors)
    out, new = tmp_path / "calibration.json", tmp_path / "folder" / "new.json"
    save_calibration(timed, out)
    monkeypatch.setattr("relaygr.worker.calibration.calibrate", lambda *_: disturbed(timed, 7.0))
    monkeypatch.setattr(CoreWatch, "__exit__", lambda watch, *_: setattr(watch, "cores", Cores(4, foreign)))
    for file in (out, new):
        done = CliRunner().invoke(app, ["calibrate", "--model", str(tmp_path / "model"), "--out", str(file)])
        assert done.exit_code == 1 and "times as long." in done.stdout
        assert re.search(f"The fitted T_hit is [0-9]+% off .*; nothing is written to {file}", done.stderr)
        assert (f"Other processes use {foreign:.1f} of 4 cores" in done.stderr) is is_said
    assert load_calibration(out) == timed and not new.exists()
    printed = CliRunner().invoke(app, ["calibrate", "--model", str(tmp_path / "model"), "--json"])
    assert printed.exit_code == 1 and json.loads(printed.stdout)["format"] == 1


@pytest.mark.parametrize(("times_as_long", "is_written"), [(1.0, True), (2.2, True), (0.2, False)])
def test_a_quick_calibration_that_is_off_is_written_and_said_unless_it_is_nonsense(
    timed: Calibration, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times_as_long: float, is_written: bool
) -> None:
    config = small_config()
    save_checkpoint(tmp_path / "model", config, random_checkpoint(config, 0).tensors)
    found = disturbed(timed, times_as_long)
    monkeypatch.setattr("relaygr.worker.calibration.calibrate", lambda *_: found)
    out = tmp_path / "calibration.json"
    done = CliRunner().invoke(app, ["calibrate", "--model", str(tmp_path / "model"), "--quick", "--out", str(out)])
    assert done.exit_code == (0 if is_written else 1) and out.exists() is is_written
    is_off = found.fit_problem is not None
    assert is_off is (times_as_long != 1)
    assert ("calibrate without --quick for production" in done.stderr) is (is_off and is_written)


def test_a_worker_serves_with_a_fit_that_is_far_off_and_its_log_says_so(timed: Calibration, tmp_path: Path) -> None:
    for calibration, said in ((timed, 0), (disturbed(timed, 9.0), 1)):
        save_calibration(calibration, tmp_path / "calibration.json")
        with capture_logs() as logs:
            assert latency_for(TimedEngine(), tmp_path / "calibration.json").coefficients == timed.coefficients
        assert len([line for line in logs if "T_hit" in line.get("cause", "")]) == said


def test_a_model_whose_scores_are_not_finite_is_not_calibrated(tmp_path: Path) -> None:
    """The calibration ranked ids that the model does not have, all by one row of its table."""
    config, ids = small_config(), np.arange(1_000, 1_040)
    tensors = dict(random_checkpoint(config, 0, ids).tensors)
    tensors["items.weight"][:-1] *= 1e30
    save_checkpoint(tmp_path / "model", config, tensors)
    out = tmp_path / "calibration.json"
    arguments = ["calibrate", "--model", str(tmp_path / "model"), "--quick", "--device", "cpu", "--out", str(out)]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 1 and "not finite numbers" in done.output
    assert not out.exists()


def test_items_that_are_measured_are_those_of_the_model() -> None:
    config, ids = small_config(), np.arange(1_000, 1_040)
    engine = build_engine(random_checkpoint(config, 0, ids), CpuDevice(), KvDtype.FLOAT32, 8)
    found = engine.known_items(500, np.random.default_rng(0))
    assert set(found) == set(ids)
    bind_own_arena(engine)
    looked_up: list[int] = []
    prefix_inputs, rank_inputs = engine.prefix_inputs, engine.rank_inputs

    def counted(made: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            inputs = made(*args, **kwargs)
            looked_up.append(inputs.unknown_items)
            return inputs

        return call

    engine.prefix_inputs, engine.rank_inputs = counted(prefix_inputs), counted(rank_inputs)  # type: ignore[method-assign]
    meter = EngineMeter(engine)
    meter.prefix(64, 32)
    meter.rank(64, 16)
    assert looked_up and not any(looked_up)


def test_the_description_is_that_of_the_present_engine() -> None:
    engine = TimedEngine()
    machine = describe(engine)
    assert machine.model_revision == engine.revision
    assert machine.kv_dtype is KvDtype.FLOAT32
    assert np.isclose(machine.page_tokens, 64)
