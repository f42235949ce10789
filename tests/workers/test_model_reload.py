"""Model reload: refused checkpoints with their reasons, and that no result mixes two models."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path as FilePath
from types import SimpleNamespace

import numpy as np
import pytest
import structlog
import torch
from prometheus_client import CollectorRegistry

import relaygr.worker.process.reloading
from relaygr.admission.corrector import Corrector
from relaygr.admission.latency import LatencyModel, Stage
from relaygr.runtime.clock import ManualClock
from relaygr.runtime.errors import RelayError
from relaygr.runtime.limits import Memory
from relaygr.schemas.messages import Behaviours, History, LatencyCoefficients, Path
from relaygr.worker.calibration import Calibration, describe, save_calibration
from relaygr.worker.device import CpuDevice, MemoryInfo
from relaygr.worker.executor.work import JobOutcome
from relaygr.worker.history.batches import HistoryBatch, HistoryRecord
from relaygr.worker.history.store import HistoryStore, StoreOrigin
from relaygr.worker.kv import KvDtype
from relaygr.worker.latest_answers import DIVERGED_ANSWERS, JUDGED_ANSWERS, FiniteScores
from relaygr.worker.memory import HEADROOM
from relaygr.worker.metrics import WorkerMetrics
from relaygr.worker.model.checkpoint import (
    WEIGHTS_FILE,
    copied_bytes,
    load_checkpoint,
    random_checkpoint,
    resident_bytes,
    save_checkpoint,
)
from relaygr.worker.model.description import Description, read_description
from relaygr.worker.model.engine import build_engine, load_engine
from relaygr.worker.model.options import ComputeDtype, ContextualFeature
from relaygr.worker.process.reloading import (
    ModelReloading,
    ReloadOutcome,
    ReloadRefusedError,
    load_beside,
    reload_delay_s,
)
from relaygr.worker.score_error import other_engine
from relaygr.worker.settings import WorkerSettings
from tests.waiting import becomes
from tests.worlds.invariants import check_invariants
from tests.worlds.model import small_config
from tests.worlds.real_executor import KINDS, PAGE_TOKENS, RealExecutorWorld, behaviours_of

COEFFICIENTS = LatencyCoefficients(1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1)


def save(folder: FilePath, seed: int = 0, **changes: object) -> FilePath:
    config = small_config(**changes)
    save_checkpoint(folder, config, random_checkpoint(config, seed).tensors)
    return folder


def settings_of(folder: FilePath, **changes: object) -> WorkerSettings:
    return WorkerSettings(**{"model": folder, "page_tokens": PAGE_TOKENS, "device": "cpu"} | changes)  # type: ignore[arg-type]


def serving(folder: FilePath):
    return load_engine(folder, "cpu", KvDtype.FLOAT32, PAGE_TOKENS)


# -- accepted and refused checkpoints ---------------------------------------------------------------------------


def test_another_checkpoint_in_the_folder_may_take_over(tmp_path):
    present = serving(save(tmp_path, seed=0))
    save(tmp_path, seed=1)
    model = load_beside(present, settings_of(tmp_path))
    assert model is not None
    assert (model.engine.revision != present.revision, model.latency) == (True, None)


def test_the_same_checkpoint_is_unchanged(tmp_path):
    assert load_beside(serving(save(tmp_path)), settings_of(tmp_path)) is None


def refusal(present, settings) -> ReloadRefusedError:
    with pytest.raises(ReloadRefusedError) as refused:
        load_beside(present, settings)
    return refused.value


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda folder: (folder / WEIGHTS_FILE).write_bytes(b"\x10" + bytes(200)), "cannot be read"),
        (lambda folder: (folder / WEIGHTS_FILE).unlink(), "cannot be read"),
        (lambda folder: (folder / "config.json").write_text("{"), "not a model configuration"),
        (lambda folder: (folder / "config.json").unlink(), "cannot be read"),
    ],
    ids=["weights are garbage", "no weights", "half a configuration", "no configuration"],
)
def test_a_broken_checkpoint_is_refused_with_what_is_wrong(tmp_path, damage, said):
    present = serving(save(tmp_path / "old"))
    damage(save(tmp_path / "new", seed=1))
    refused = refusal(present, settings_of(tmp_path / "new"))
    assert (refused.outcome, said in str(refused)) == (ReloadOutcome.BROKEN, True)


@pytest.mark.parametrize(
    "changes",
    [{"num_layers": 3}, {"hidden_dim": 8}, {"max_prefix_behaviours": 201}, {"inputs": "interleaved"}],
    ids=lambda changes: next(iter(changes)),
)
def test_a_checkpoint_whose_prefixes_do_not_fit_the_pages_is_refused(tmp_path, changes):
    present = serving(save(tmp_path / "old"))
    refused = refusal(present, settings_of(save(tmp_path / "new", **changes)))
    assert refused.outcome is ReloadOutcome.UNFIT
    assert "restart the worker to use it" in str(refused)


def test_a_checkpoint_whose_scores_are_not_finite_is_refused(tmp_path):
    """Finite weights may still give scores that are not finite."""
    present = serving(save(tmp_path / "old"))
    config = small_config()
    tensors = {name: tensor * 1e30 for name, tensor in random_checkpoint(config, 1).tensors.items()}
    save_checkpoint(tmp_path / "new", config, tensors)
    refused = refusal(present, settings_of(tmp_path / "new"))
    assert (refused.outcome, "not finite" in str(refused)) == (ReloadOutcome.BROKEN, True)


IDS = np.arange(1_000, 1_040)
"""A vocabulary without the ids 0 to 39."""


def save_diverged(folder: FilePath, name: str, factor: float, rows: slice, **changes: object) -> FilePath:
    config = small_config(**changes)
    tensors = dict(random_checkpoint(config, 1, IDS).tensors)
    tensors[name] = tensors[name].clone()
    tensors[name][rows] *= factor
    save_checkpoint(folder, config, tensors)
    return folder


COUNTRY = (ContextualFeature(name="country", cardinality=3),)


@pytest.mark.parametrize(
    ("name", "factor", "rows", "changes"),
    [
        ("items.weight", 1e30, slice(0, 40), {}),
        ("items.weight", 1e30, slice(40, 41), {}),
        ("actions.weight", 1e30, slice(0, 4), {}),
        ("actions.weight", 1e30, slice(4, 5), {}),
        ("features.0.weight", 1e30, slice(0, 3), {"contextual_features": COUNTRY}),
        ("features.0.weight", 1e30, slice(3, 4), {"contextual_features": COUNTRY}),
        ("positions.weight", 1e30, slice(100, 150), {}),
        ("layers.1.output.weight", 1e38, slice(None), {}),
        ("readout.mlp.1.weight", 1e38, slice(None), {}),
    ],
    ids=[
        "known items", "the row of unknown items", "known actions", "unknown actions", "known features",
        "unknown features", "late positions", "a layer", "the read-out",
    ],
)  # fmt: skip
def test_a_diverged_model_is_refused_whichever_rows_diverged(tmp_path, name, factor, rows, changes):
    """The trial ranked the items 0 to 3. A model with other ids has one row for all of them, which is never trained."""
    config = small_config(**changes)
    save_checkpoint(tmp_path / "old", config, random_checkpoint(config, 0, IDS).tensors)
    present = serving(tmp_path / "old")
    refused = refusal(present, settings_of(save_diverged(tmp_path / "new", name, factor, rows, **changes)))
    assert (refused.outcome, "not finite" in str(refused)) == (ReloadOutcome.BROKEN, True)


def test_a_model_that_diverged_for_items_of_stored_users_is_refused(tmp_path):
    """Their items are few among those of a large vocabulary, from which the made-up users take theirs."""
    many = np.arange(1_000, 101_000)
    config = small_config(vocabulary_size=many.size)
    tensors = dict(random_checkpoint(config, 0, many).tensors)
    save_checkpoint(tmp_path / "old", config, tensors)
    popular = slice(70, 75)
    tensors["items.weight"] = tensors["items.weight"].clone()
    tensors["items.weight"][popular] *= 1e30
    save_checkpoint(tmp_path / "new", config, tensors)
    present, settings = serving(tmp_path / "old"), settings_of(tmp_path / "new")
    assert load_beside(present, settings) is not None, "made-up users do not find it"
    store = HistoryStore.open(tmp_path / "store", 16 << 20)
    with closing(store):
        store.trust(StoreOrigin("cluster", "history", "id"))
        behaviours = Behaviours(many[popular], np.zeros(5, "<u2"), np.arange(5))
        histories = [History(f"u{number}", 1, np.empty(0, "<i8"), behaviours) for number in range(3)]
        records = tuple(HistoryRecord(each.user_id, place, each) for place, each in enumerate(histories))
        store.apply_all([HistoryBatch(0, records, 3)])
        with pytest.raises(ReloadRefusedError, match="not finite"):
            load_beside(present, settings, store)


def test_without_memory_for_both_models_the_old_one_stays(tmp_path, monkeypatch):
    present = serving(save(tmp_path / "old"))
    monkeypatch.setattr(relaygr.worker.process.reloading, "available_memory", lambda: Memory(10, 10))
    assert refusal(present, settings_of(save(tmp_path / "new", seed=1))).outcome is ReloadOutcome.NO_MEMORY


def test_weights_that_are_stored_in_fewer_bits_count_as_large_as_they_become(tmp_path, monkeypatch):
    """Weights become float32, tables keep their type, and a table that stays in host memory is not counted."""
    present = serving(save(tmp_path / "old"))
    config = small_config()
    tensors = {name: tensor.bfloat16() for name, tensor in random_checkpoint(config, 1).tensors.items()}
    save_checkpoint(tmp_path / "new", config, tensors)
    items = tensors["items.weight"].nbytes
    wanted = items + sum(2 * t.nbytes for name, t in tensors.items() if name != "items.weight")
    copies = copied_bytes({name: t.shape for name, t in tensors.items()}, torch.bfloat16, "cpu")
    assert resident_bytes(tmp_path / "new", items, torch.bfloat16, "cpu") == wanted + copies
    assert resident_bytes(tmp_path / "new", items - 1, torch.bfloat16, "cpu") == wanted + copies - items
    some = int(wanted / HEADROOM) - 10
    monkeypatch.setattr(relaygr.worker.process.reloading, "available_memory", lambda: Memory(some, some))
    assert refusal(present, settings_of(tmp_path / "new")).outcome is ReloadOutcome.NO_MEMORY


def test_both_models_must_fit_into_the_device(tmp_path):
    class SmallAccelerator(CpuDevice):
        is_cpu = False

        def memory(self) -> MemoryInfo:
            return MemoryInfo(1_000, 10**9)

    present = serving(save(tmp_path / "old"))
    present.device = SmallAccelerator()
    assert refusal(present, settings_of(save(tmp_path / "new", seed=1))).outcome is ReloadOutcome.NO_MEMORY


def test_without_memory_for_the_forwards_of_the_new_model_the_old_one_stays(tmp_path, monkeypatch):
    """Only the weights were checked once: a wider MLP with the same K,V ran out of memory under traffic."""
    present = serving(save(tmp_path / "old"))
    settings = settings_of(save(tmp_path / "new", seed=1))
    takes = {present.revision: 10_000_000, load_checkpoint(tmp_path / "new").revision: 14_000_000}
    monkeypatch.setattr(relaygr.worker.process.reloading, "forward_bytes", lambda engine, _: takes[engine.revision])
    monkeypatch.setattr(CpuDevice, "memory", lambda _: MemoryInfo(int(4_000_000 / HEADROOM) - 2, 10**9))
    assert refusal(present, settings).outcome is ReloadOutcome.NO_MEMORY
    monkeypatch.setattr(CpuDevice, "memory", lambda _: MemoryInfo(int(4_000_000 / HEADROOM) + 2, 10**9))
    assert load_beside(present, settings) is not None


def test_a_device_without_memory_for_the_new_model_is_reported_as_no_memory(tmp_path, monkeypatch):
    present = serving(save(tmp_path / "old"))

    def full(*_):
        raise torch.OutOfMemoryError("tried to allocate")

    monkeypatch.setattr(relaygr.worker.process.reloading, "build_engine", full)
    assert refusal(present, settings_of(save(tmp_path / "new", seed=1))).outcome is ReloadOutcome.NO_MEMORY


def test_a_calibration_file_must_be_of_the_new_model_and_is_then_used(tmp_path):
    """Otherwise the next restart would refuse the file."""
    present = serving(save(tmp_path, seed=0))
    file = tmp_path / "calibration.json"
    settings = settings_of(tmp_path, calibration=file)
    calibration = Calibration(describe(present), datetime.now(UTC).isoformat(), COEFFICIENTS, (), (), (), ())
    save_calibration(calibration, file)
    save(tmp_path, seed=1)
    assert refusal(present, settings).outcome is ReloadOutcome.UNFIT
    save_calibration(replace(calibration, machine=describe(serving(tmp_path))), file)
    model = load_beside(present, settings)
    assert model is not None and model.latency == LatencyModel(COEFFICIENTS)


def test_a_new_calibration_begins_without_the_corrections_of_the_old_one():
    corrector = Corrector(LatencyModel(COEFFICIENTS), weight=0.5)
    corrector.observe(Stage.HIT, 100.0, 200.0)
    corrector.recalibrate(LatencyModel(replace(COEFFICIENTS, c0=7.0)))
    assert (corrector.model.coefficients.c0, corrector.factor(Stage.HIT)) == (7.0, 1.0)


# -- the swap -------------------------------------------------------------------------------------


def second_model(world: RealExecutorWorld, kind: str = "plain"):
    """Another checkpoint of the same shape, and its engine on the world's arena."""
    checkpoint = random_checkpoint(small_config(**KINDS[kind]), seed=4)
    engine = build_engine(checkpoint, CpuDevice(), KvDtype.FLOAT32, PAGE_TOKENS)
    engine.bind(world.arena)
    return engine, checkpoint


def assert_of(world: RealExecutorWorld, request_id: str, checkpoint, behaviours) -> None:
    work, _ = world.outbox.answered[request_id]
    assert work.prefix.revision == checkpoint.revision
    world.assert_exact(work, behaviours, checkpoint)


@pytest.mark.parametrize("kind", ["plain", "contextual mask", "positions from the end and times"])
def test_after_a_swap_old_prefixes_match_nothing_and_scores_are_of_the_new_model(kind):
    world = RealExecutorWorld(kind)
    version = world.put("u", 100)
    world.rank("u", version, "r1")
    engine, successor = second_model(world, kind)
    world.executor.serve_with(engine)
    work = world.rank("u", version, "r2")
    assert (work.path, work.tokens_cached) == (Path.FULL, 0)
    assert_of(world, "r1", world.checkpoint, behaviours_of(100))
    assert_of(world, "r2", successor, behaviours_of(100))
    assert world.rank("u", version, "r3").path is Path.HBM
    assert world.cache.keep_only(engine.namespace) == 1, "a prefix of the old model"
    assert world.rank("u", version, "r4").path is Path.HBM


@pytest.mark.slow
@pytest.mark.parametrize("steps", range(9))
def test_work_in_flight_begins_again_with_the_new_model(steps):
    """Jobs, a half-computed prefix, requests that wait for it, ready requests, and one on the scratch pages."""
    world = RealExecutorWorld("plain", hbm_pages=16)
    versions = {user: world.put(user, 150, seed) for seed, user in enumerate("abc")}
    world.rank("a", versions["a"], "r0")
    for user, version in versions.items():
        world.submit(user, version, f"{user}1")
        world.submit(user, version, f"{user}2", suffix=behaviours_of(4, ord(user) - 97, start=150))
    world.job("c", versions["c"], "c3") if steps % 2 else None
    for _ in range(steps):
        world.executor.step()
    before = set(world.outbox.answered)
    engine, successor = second_model(world)
    world.executor.serve_with(engine)
    world.run()
    assert world.outbox.failures == []
    assert len(world.outbox.answered) == 7
    for seed, user in enumerate("abc"):
        for request_id, count in ((f"{user}1", 150), (f"{user}2", 154)):
            of = world.checkpoint if request_id in before else successor
            assert_of(world, request_id, of, behaviours_of(count, seed))
    assert world.executor.ranking_outstanding == 0
    world.cache.keep_only(engine.namespace)
    stats = world.cache.stats().hbm
    assert (stats.pinned, stats.in_flight) == (0, 0)
    assert world.cache.stats().lookups == 7, "hits, joins and misses are requests, also of those that began again"
    check_invariants(world.cache)


def test_a_job_in_flight_is_computed_for_the_new_model():
    world = RealExecutorWorld("plain")
    version = world.put("u", 150)
    world.run = lambda: None  # type: ignore[method-assign]
    world.job("u", version, "r")
    world.executor.step()
    engine, _ = second_model(world)
    world.executor.serve_with(engine)
    del world.run
    world.run()
    assert world.outbox.jobs == [JobOutcome.COMPUTED]
    assert world.rank("u", version, "r").path is Path.HBM


def test_a_model_of_another_shape_can_not_take_over():
    world = RealExecutorWorld("plain")
    other = build_engine(random_checkpoint(small_config(num_layers=3), 0), CpuDevice(), KvDtype.FLOAT32, PAGE_TOKENS)
    with pytest.raises(ValueError, match="another shape"):
        world.executor.serve_with(other)
    assert world.executor.engine is world.engine


def test_the_old_models_memory_is_freed_at_the_swap():
    """The garbage collector would not free it: after the start it no longer visits old objects."""
    world = RealExecutorWorld("plain")
    world.rank("u", world.put("u", 50), "r1")
    gc.disable()
    try:
        old = weakref.ref(world.engine)
        engine, _ = second_model(world)
        world.executor.serve_with(engine)
        world.engine = engine
        assert old() is None
    finally:
        gc.enable()


def test_a_link_that_is_pointed_at_another_revision_meanwhile_changes_nothing(
    tmp_path: FilePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fit was checked with one configuration, and the other one served."""
    present = serving(save(tmp_path / "present"))
    link = tmp_path / "current"
    link.symlink_to(save(tmp_path / "first", 1, normalizer=60.0))
    save(tmp_path / "second", 2, normalizer=70.0)

    def read_and_point(folder: FilePath) -> Description:
        found = read_description(folder)
        link.unlink()
        link.symlink_to(tmp_path / "second")
        return found

    monkeypatch.setattr("relaygr.worker.process.reloading.read_description", read_and_point)
    loaded = load_beside(present, settings_of(link))
    assert loaded is not None
    assert loaded.engine.revision == load_checkpoint(tmp_path / "first").revision


def test_precision_is_not_measured_against_another_revision(tmp_path: FilePath) -> None:
    engine = serving(save(tmp_path / "model"))
    save(tmp_path / "model", 1)
    with pytest.raises(RelayError, match=r"was replaced by revision .* while it was loaded"):
        other_engine(engine, tmp_path / "model", KvDtype.FLOAT32, ComputeDtype.FLOAT32, 1 << 30)


# -- ModelReloading ---------------------------------------------------------------------------


WORLDS: list[Reloading] = []


class Reloading:
    """`ModelReloading` with small fakes of the worker's parts."""

    def __init__(self, folder: FilePath, **settings: object) -> None:
        self.registry = CollectorRegistry()
        self.prepared = SimpleNamespace(
            engine=serving(folder),
            model=folder.resolve(),
            corrector=Corrector(LatencyModel(COEFFICIENTS)),
            store=None,
        )
        self.clock = ManualClock()
        self.reloading = ModelReloading(settings_of(folder, **settings), self.prepared, self.registry, self.clock)  # type: ignore[arg-type]
        WORLDS.append(self)
        self.calls = []
        self.warm_ups = []
        self.metrics = WorkerMetrics(CollectorRegistry())
        self.parts = SimpleNamespace(
            arena=self.prepared.engine.device.empty_bytes(1, self.prepared.engine.geometry.page_bytes),
            executor=SimpleNamespace(post=self.calls.append, serve_with=lambda engine: None),
            metrics=self.metrics,
            results=SimpleNamespace(finite_scores=FiniteScores()),
            periodic=SimpleNamespace(warm_up=SimpleNamespace(begin=lambda: self.warm_ups.append(True))),
            cache=SimpleNamespace(keep_only=lambda namespace: 0),
        )

    def reload(self, parts=None, is_active=False) -> None:
        self.reloading.request()
        self.reloading.tick(parts, is_active=is_active)
        self.await_loading()
        self.reloading.tick(parts, is_active=is_active)

    def await_loading(self) -> None:
        assert becomes(lambda: not self.reloading.is_loading)

    def outcomes(self) -> dict[str, float]:
        counts = {
            outcome.value: self.registry.get_sample_value("relaygr_model_reloads_total", {"outcome": outcome.value})
            for outcome in ReloadOutcome
        }
        return {outcome: count for outcome, count in counts.items() if count}


@pytest.fixture(autouse=True)
def closed_reloadings(nothing_left_behind: None) -> Iterator[None]:
    yield
    while WORLDS:
        WORLDS.pop().reloading.close()
    assert becomes(lambda: not any(thread.name == "reload" for thread in threading.enumerate()))


def test_a_standby_swaps_at_once(tmp_path):
    world = Reloading(save(tmp_path, seed=0))
    old = world.prepared.engine.revision
    save(tmp_path, seed=1)
    world.reload()
    assert world.prepared.engine.revision != old
    assert world.outcomes() == {"swapped": 1}


def test_after_any_failed_reload_the_worker_keeps_its_model_and_counts_the_outcome(tmp_path):
    world = Reloading(save(tmp_path, seed=0))
    engine = world.prepared.engine
    world.reload()
    save(tmp_path, num_layers=3)
    world.reload()
    (tmp_path / "config.json").write_text("nonsense")
    world.reload()
    assert world.prepared.engine is engine
    assert world.outcomes() == {"unchanged": 1, "unfit": 1, "broken": 1}


def test_a_second_reload_that_is_requested_while_one_loads_is_not_lost(tmp_path, monkeypatch):
    world = Reloading(save(tmp_path))
    may_end = threading.Event()
    monkeypatch.setattr("relaygr.worker.process.reloading.load_beside", lambda *_: may_end.wait(30) and None)
    for _ in range(3):
        world.reloading.request()
        world.reloading.tick(None, is_active=False)
    may_end.set()
    for _ in range(2):
        world.await_loading()
        world.reloading.tick(None, is_active=False)
    assert world.outcomes() == {"unchanged": 2}, "two of the three requests share one reload"


def test_a_reload_of_the_old_model_that_is_requested_before_the_swap_waits_for_it(tmp_path):
    """Compared with the model about to be replaced, the checkpoint was `unchanged`; then the other model served."""
    world = Reloading(save(tmp_path, seed=0))
    first = world.prepared.engine.revision
    save(tmp_path, seed=1)
    world.reload(world.parts, is_active=True)
    save(tmp_path, seed=0)
    world.reloading.request()
    world.reloading.tick(world.parts, is_active=True)
    assert not world.reloading.is_loading, "waits for the swap"
    world.calls.pop()()
    assert world.prepared.engine.revision != first
    world.reload(world.parts, is_active=True)
    world.calls.pop()()
    assert world.prepared.engine.revision == first
    assert world.outcomes() == {"swapped": 2}


def test_a_swap_replaces_the_latency_model_and_the_size_of_the_weights(tmp_path):
    save(tmp_path / "model", seed=0)
    file = tmp_path / "calibration.json"
    world = Reloading(tmp_path / "model", calibration=file)
    save(tmp_path / "model", seed=1)
    slower = replace(COEFFICIENTS, b1=7.0)
    machine = describe(serving(tmp_path / "model"))
    save_calibration(Calibration(machine, datetime.now(UTC).isoformat(), slower, (), (), (), ()), file)
    world.reload(world.parts)
    assert world.prepared.corrector.model.coefficients == slower
    gauge = world.metrics.bytes_at_most.labels("weights")._value.get()
    assert gauge == world.prepared.engine.weights_bytes > 0


def test_weights_that_were_overwritten_in_place_are_logged(tmp_path):
    """Weights are mapped from their file, so the serving model no longer matched its revision."""
    world = Reloading(save(tmp_path, seed=0))
    file = tmp_path / WEIGHTS_FILE
    file.write_bytes(file.read_bytes() + b" ")
    with structlog.testing.capture_logs() as logs:
        world.reload()
    assert "overwritten in place" in logs[0]["event"]
    save(tmp_path, seed=1)
    with structlog.testing.capture_logs() as logs:
        world.reload()
    assert not any("overwritten" in line["event"] for line in logs), "a file that was replaced is another one"
    file.write_bytes(file.read_bytes() + b" ")
    with structlog.testing.capture_logs() as logs:
        world.reload()
    assert "overwritten in place" in logs[0]["event"], "the replaced file serves now"


# -- a model that diverges in use --------------------------------------------------------------------


def answers(world: Reloading, *, finite: int = 0, broken: int = 0) -> None:
    for are_finite, count in ((True, finite), (False, broken)):
        for _ in range(count):
            world.parts.results.finite_scores.note(are_finite=are_finite)
    world.reloading.tick(world.parts, is_active=True)


def swapped(folder: FilePath) -> tuple[Reloading, str, str]:
    """An active worker that has just swapped its model; the old and the new revision."""
    world = Reloading(save(folder, seed=0))
    old = world.prepared.engine.revision
    save(folder, seed=1)
    world.reload(world.parts, is_active=True)
    world.calls.pop()()
    return world, old, world.prepared.engine.revision


def test_a_model_that_diverges_in_use_gives_way_to_the_previous_one(tmp_path):
    world, old, new = swapped(tmp_path)
    assert world.prepared.engine.revision == new
    answers(world, finite=20, broken=DIVERGED_ANSWERS - 1)
    assert not world.calls, "single requests may read broken rows"
    with structlog.testing.capture_logs() as logs:
        answers(world, broken=1)
    assert [line["restores"] for line in logs] == [old]
    assert world.parts.results.finite_scores.is_diverged, "not ready"
    world.calls.pop()()
    assert world.prepared.engine.revision == old
    assert not world.parts.results.finite_scores.is_diverged
    assert world.outcomes() == {"swapped": 1, "restored": 1}
    answers(world, broken=DIVERGED_ANSWERS)
    assert not world.calls, "there is no third model"


def test_the_latency_model_of_the_previous_model_is_restored_too(tmp_path):
    save(tmp_path / "model", seed=0)
    file = tmp_path / "calibration.json"
    world = Reloading(tmp_path / "model", calibration=file)
    save(tmp_path / "model", seed=1)
    slower = replace(COEFFICIENTS, b1=7.0)
    machine = describe(serving(tmp_path / "model"))
    save_calibration(Calibration(machine, datetime.now(UTC).isoformat(), slower, (), (), (), ()), file)
    world.reload(world.parts, is_active=True)
    world.calls.pop()()
    assert world.prepared.corrector.calibrated.coefficients == slower
    answers(world, broken=DIVERGED_ANSWERS)
    world.calls.pop()()
    assert world.prepared.corrector.calibrated.coefficients == COEFFICIENTS


def test_the_previous_model_is_freed_once_the_new_one_has_proved_itself(tmp_path):
    world = Reloading(save(tmp_path, seed=0))
    old = weakref.ref(world.prepared.engine)
    save(tmp_path, seed=1)
    world.reload(world.parts, is_active=True)
    world.calls.pop()()
    answers(world, finite=JUDGED_ANSWERS - 1)
    assert old() is not None
    answers(world, finite=1)
    assert old() is None
    answers(world, broken=DIVERGED_ANSWERS)
    assert not world.calls and world.parts.results.finite_scores.is_diverged


def test_a_standby_keeps_one_model(tmp_path):
    """It answers no request, so its new model could never prove itself."""
    world = Reloading(save(tmp_path, seed=0))
    old = weakref.ref(world.prepared.engine)
    save(tmp_path, seed=1)
    world.reload()
    assert old() is None


def test_the_next_reload_has_room_for_its_model(tmp_path):
    world, old, _ = swapped(tmp_path)
    save(tmp_path, seed=2)
    world.reload(world.parts, is_active=True)
    world.calls.pop()()
    answers(world, broken=DIVERGED_ANSWERS)
    world.calls.pop()()
    assert world.prepared.engine.revision not in (old, None)
    assert world.outcomes() == {"swapped": 2, "restored": 1}


# -- reloads of a fleet ---------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [2, 3, 8, 50])
def test_the_workers_of_a_fleet_reload_one_after_the_other_at_even_distances(workers: int):
    delays_s = sorted(reload_delay_s(f"worker-{number:02d}", 60) for number in range(workers))
    gaps_s = [later - earlier for earlier, later in pairwise([*delays_s, 60])]
    assert delays_s[0] == 0
    assert min(gaps_s[:-1]) > 60 / workers / 3
    assert max(gaps_s) < 60 / workers * 2


def test_an_id_without_a_number_has_its_own_place_and_without_a_spread_nobody_waits():
    assert 0 < reload_delay_s("blue", 60) < 60
    assert reload_delay_s("blue", 60) != reload_delay_s("green", 60)
    assert reload_delay_s("worker-07", 0) == 0


def test_a_reload_waits_for_its_turn_and_serves_meanwhile(tmp_path):
    world = Reloading(save(tmp_path, seed=0), worker_id="worker-01", reload_spread_s=10)
    save(tmp_path, seed=1)
    world.reloading.request()
    world.reloading.tick(world.parts, is_active=True)
    world.clock.advance_us(6_000_000)
    world.reloading.tick(world.parts, is_active=True)
    assert not world.reloading.is_loading
    world.clock.advance_us(300_000)
    world.reloading.tick(world.parts, is_active=True)
    world.await_loading()
    world.reloading.tick(None, is_active=False)
    assert world.outcomes() == {"swapped": 1}


def test_a_worker_that_polls_loads_another_checkpoint_once(tmp_path):
    world = Reloading(save(tmp_path, seed=0), model_poll_s=2)
    save(tmp_path, seed=1)
    for advance_us, expected in ((1_900_000, {}), (100_000, {"swapped": 1}), (2_000_000, {"swapped": 1})):
        world.clock.advance_us(advance_us)
        world.reloading.tick(world.parts, is_active=False)
        world.await_loading()
        world.reloading.tick(None, is_active=False)
        assert world.outcomes() == expected


def test_a_worker_that_polls_tries_a_broken_checkpoint_only_once(tmp_path):
    world = Reloading(save(tmp_path, seed=0), model_poll_s=1)
    (tmp_path / WEIGHTS_FILE).unlink()
    (tmp_path / WEIGHTS_FILE).write_bytes(bytes(100))
    for _ in range(3):
        world.clock.advance_us(1_000_000)
        world.reloading.tick(world.parts, is_active=False)
        world.await_loading()
    assert world.outcomes() == {"broken": 1}


def test_a_deploy_during_the_start_is_found_by_the_first_look(tmp_path: FilePath) -> None:
    link = tmp_path / "current"
    link.symlink_to(save(tmp_path / "first"))
    world = Reloading(link, model_poll_s=10)
    late = save(tmp_path / "second", 1)
    link.unlink()
    link.symlink_to(late)
    # As after a start that had loaded the first one before the deploy.
    world.reloading = ModelReloading(
        settings_of(link, model_poll_s=10),
        world.prepared,
        CollectorRegistry(),
        world.clock,  # type: ignore[arg-type]
    )
    world.clock.advance_us(11_000_000)
    world.reloading.tick(None, is_active=False)
    assert becomes(lambda: not world.reloading.is_loading)
    world.reloading.tick(None, is_active=False)
    assert world.prepared.engine.revision == load_checkpoint(late).revision
