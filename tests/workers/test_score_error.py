"""The check of an inexact DRAM tier: the measured error, and the memory plan."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from relaygr.cli.model import app
from relaygr.schemas.messages import Behaviours
from relaygr.worker.cache.arena import block_pages, coding_bytes
from relaygr.worker.kv import DramGeometry, DramKvDtype, KvDtype, KvGeometry
from relaygr.worker.model.checkpoint import random_checkpoint, save_checkpoint
from relaygr.worker.model.config import ModelConfig
from relaygr.worker.model.description import description_of
from relaygr.worker.model.engine import load_engine
from relaygr.worker.model.interface import Engine
from relaygr.worker.model.options import ContextualFeature, Preset, Task, TaskKind, preset_fields
from relaygr.worker.process.allocation import allocate_memory, plan_memory
from relaygr.worker.score_error import (
    SampleUser,
    _error_of,
    made_sample,
    made_users,
    measure_dram_error,
    measure_engine_error,
)
from relaygr.worker.settings import WorkerSettings
from tests.worlds.model import small_config

PAGE_TOKENS = 16


def save(folder: Path, config: ModelConfig, seed: int = 0) -> Path:
    save_checkpoint(folder, config, random_checkpoint(config, seed).tensors)
    return folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save(tmp_path, small_config())


def engine_of(model: Path, dtype: KvDtype = KvDtype.FLOAT32) -> Engine:
    return load_engine(model, "cpu", dtype, PAGE_TOKENS)


class TestMeasurement:
    def test_fewer_bits_cause_a_larger_error(self, model: Path) -> None:
        users, candidates = made_sample(engine_of(model))
        bfloat16, int8 = (
            measure_dram_error(engine_of(model), dtype, users, candidates)
            for dtype in (DramKvDtype.BFLOAT16, DramKvDtype.INT8)
        )
        assert 0 < bfloat16.max_score_error < int8.max_score_error < 0.02
        assert bfloat16.mean_score_error <= bfloat16.max_score_error
        assert int8.topk_overlap > 0.8
        assert (int8.users, int8.candidates) == (16, 32)

    def test_an_exact_tier_causes_no_error(self, model: Path) -> None:
        users, candidates = made_sample(engine_of(model))
        error = measure_dram_error(engine_of(model), DramKvDtype.SAME, users, candidates)
        assert (error.max_score_error, error.mean_score_error, error.topk_overlap) == (0, 0, 1)

    def test_scores_that_are_all_zero_do_not_change(self, tmp_path: Path) -> None:
        config = small_config()
        tensors = random_checkpoint(config, 0).tensors
        silent = {name: tensor * (not name.startswith("readout")) for name, tensor in tensors.items()}
        save_checkpoint(tmp_path, config, silent)
        users, candidates = made_sample(engine_of(tmp_path))
        error = measure_dram_error(engine_of(tmp_path), DramKvDtype.INT8, users, candidates)
        assert (error.max_score_error, error.topk_overlap) == (0, 1)

    def test_generated_users_have_the_models_items_features_and_limits(self, tmp_path: Path) -> None:
        features = (ContextualFeature(name="country", cardinality=3), ContextualFeature(name="age", cardinality=9))
        config = small_config(contextual_features=features)
        items = np.arange(0, 400, 10)
        save_checkpoint(tmp_path, config, random_checkpoint(config, 0, items).tensors)
        users, candidates = made_sample(engine_of(tmp_path), users=3)
        assert [len(user.behaviours) for user in users] == [200, 100, 50]
        assert all(np.isin(user.behaviours.items, items).all() for user in users)
        assert all(user.features.shape == (2,) for user in users)
        assert np.unique(candidates).size == candidates.size == 32

    def test_generated_users_exercise_every_input(self, tmp_path: Path) -> None:
        features = (
            ContextualFeature(name="country", cardinality=3),
            ContextualFeature(name="genres", cardinality=20, tokens=2),
        )
        config = small_config(contextual_features=features)
        save_checkpoint(tmp_path, config, random_checkpoint(config, 0).tensors)
        users, _ = made_sample(engine_of(tmp_path))
        seen = np.stack([user.features for user in users])
        # The last value and the last action are unknown to the model.
        assert set(seen[:, 0]) == set(range(4))
        assert set(seen[:, 1:].ravel()) == set(range(21))
        assert set(users[0].behaviours.actions) == set(range(config.num_actions + 1))
        assert set(users[0].behaviours.items) == set(range(config.vocabulary_size))
        steps_ms = np.concatenate([np.diff(user.behaviours.timestamps_ms) for user in users])
        assert all(((steps_ms >= low) & (steps_ms < 100 * low)).any() for low in (10, 1_000, 100_000, 10_000_000))

    def test_generated_users_have_every_bit_of_the_actions(self) -> None:
        config = small_config(**preset_fields(Preset.DLRM_V3, 16, 200))
        users, _ = made_users(description_of(config), np.arange(50))
        assert config.dlrm_inputs is not None
        for bit in config.dlrm_inputs.action_weights:
            assert {bool(action & bit) for action in users[0].behaviours.actions} == {False, True}

    @pytest.mark.parametrize("added", [0.0, 1000.0, -1e4])
    def test_a_constant_added_to_all_scores_changes_no_error(self, tmp_path: Path, added: float) -> None:
        """A bias of 1,000 turned a refused model into an accepted one."""
        config = small_config(tasks=(Task(name="stars", kind=TaskKind.REGRESSION),))
        tensors = {name: tensor.clone() for name, tensor in random_checkpoint(config, 0).tensors.items()}
        errors = []
        for folder in (tmp_path / "plain", tmp_path / "added"):
            save_checkpoint(folder, config, tensors)
            users, candidates = made_sample(engine_of(folder), 4)
            errors.append(measure_dram_error(engine_of(folder), DramKvDtype.INT8, users, candidates))
            tensors["readout.mlp.1.bias"] += added
        assert errors[1].max_score_error == pytest.approx(errors[0].max_score_error, rel=0.2)

    @pytest.mark.parametrize(
        ("scores", "scale"),
        [
            ([[1.0, 3.0], [5.0, 5.5]], [2.0, 0.5]),
            ([[1.0, 3.0], [5.0, 5.0]], [2.0, 4.0]),
            ([[1000.0, 1000.0 + 1e-4], [1001.0, 1003.0]], [3.0, 2.0]),
            ([[7.0, 7.0], [7.0, 7.0]], [7.0, 7.0]),
            ([[-7.0, -7.0], [-7.0, -7.0]], [7.0, 7.0]),
            ([[0.0, 0.0], [0.0, 0.0]], [1.0, 1.0]),
        ],
        ids=["own spread", "one without", "one of rounding", "none", "negative", "zeros"],
    )
    def test_an_error_is_a_share_of_the_spread(self, scores: list[list[float]], scale: list[float]) -> None:
        exact = np.array(scores, np.float64)[..., None]
        pairs = [(each.astype(np.float32), (each + 0.25).astype(np.float32)) for each in exact]
        error = _error_of(pairs, np.arange(2))
        assert error.max_score_error == pytest.approx(0.25 / min(scale), rel=1e-3)
        assert error.mean_score_error == pytest.approx(np.mean([0.25 / each for each in scale]), rel=1e-3)

    def test_after_its_time_a_measurement_is_of_one_user(self, model: Path) -> None:
        engine = engine_of(model)
        assert measure_dram_error(engine, DramKvDtype.INT8, *made_sample(engine, 4), seconds=0).users == 1
        assert measure_engine_error(engine, engine_of(model), *made_sample(engine, 4), seconds=0).users == 1

    def test_a_measurement_without_users_is_refused(self, model: Path) -> None:
        with pytest.raises(ValueError, match="no users"):
            measure_dram_error(engine_of(model), DramKvDtype.INT8, [], np.arange(3))

    def test_a_user_without_behaviours_causes_no_error(self, model: Path) -> None:
        nobody = SampleUser(np.empty(0, np.int64), Behaviours.empty())
        error = measure_dram_error(engine_of(model), DramKvDtype.INT8, [nobody], np.arange(3))
        assert error.max_score_error == 0


class TestCapacity:
    def settings(self, dtype: str) -> WorkerSettings:
        return WorkerSettings(hbm_bytes=1 << 20, dram_bytes=1 << 20, page_tokens=PAGE_TOKENS, dram_kv_dtype=dtype)  # type: ignore[arg-type]

    def test_smaller_pages_are_more_prefixes_in_the_same_bytes(self, model: Path) -> None:
        engine, capacities = engine_of(model), {}
        for dtype in DramKvDtype:
            taken = allocate_memory(engine, self.settings(dtype), None)
            capacities[dtype] = taken.built.cache.stats().dram.capacity
            dram = taken.built.dram_arena
            assert dram is not None
            assert dram.nbytes == capacities[dtype] * DramGeometry(engine.geometry, dtype).page_bytes <= 1 << 20
            taken.built.cache.close()
        assert capacities[DramKvDtype.BFLOAT16] // 2 == capacities[DramKvDtype.SAME]
        # Heads of 8 and 6: 56 bytes a token and head become 14, and two scales of 4.
        assert capacities[DramKvDtype.INT8] == pytest.approx(56 / 22 * capacities[DramKvDtype.SAME], rel=0.01)

    def test_the_plan_counts_the_tier_and_the_buffers_for_coding(self, model: Path) -> None:
        engine = engine_of(model)
        same, int8 = (plan_memory(engine, self.settings(dtype), 0, keeps_prefixes=False) for dtype in ("same", "int8"))
        geometry = DramGeometry(engine.geometry, DramKvDtype.INT8)
        assert int8.dram_bytes == (1 << 20) // geometry.page_bytes * geometry.page_bytes
        assert int8.scratch_bytes - same.scratch_bytes == 2 * coding_bytes(geometry) > 0

    def test_pinned_memory_is_planned_as_the_device_rounds_it(
        self, model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        engine = engine_of(model)
        monkeypatch.setattr(type(engine.device), "pinned_bytes", lambda _, size: 1 << (size - 1).bit_length())
        plan = plan_memory(engine, self.settings("int8"), 0, keeps_prefixes=False)
        assert plan.dram_bytes == 1 << 20

    def test_coding_takes_pages_in_blocks(self) -> None:
        kv = KvGeometry(12, 8, 64, 64, 64, KvDtype.BFLOAT16)
        geometry = DramGeometry(kv, DramKvDtype.INT8)
        assert block_pages(geometry) * kv.page_bytes <= 4 << 20
        assert coding_bytes(geometry) <= 32 << 20


class TestCommand:
    def test_it_reads_histories_from_a_log(self, model: Path, tmp_path: Path) -> None:
        log = tmp_path / "ratings.csv"
        lines = [f"{user},{item % 40},1.5,{1_600_000_000 + item}" for user in range(7) for item in range(30)]
        log.write_text("userId,movieId,rating,timestamp\n" + "\n".join(lines) + "\n")
        ended = CliRunner().invoke(
            app, ["check", str(model), "--device", "cpu", "--interactions", str(log), "--users", "5",
                  "--minutes", "30", "--dram-kv-dtype", "int8", "--max-score-error", "0.5",
                  "--min-topk-overlap", "0.1"],
        )  # fmt: skip
        assert ended.exit_code == 0, ended.output
        assert "5 users, 30 candidates" in " ".join(ended.output.split())

    def test_a_log_with_codes_that_the_model_does_not_know_is_refused(self, model: Path, tmp_path: Path) -> None:
        """They were measured as unknown codes, so the check said nothing about the model's own."""
        log = tmp_path / "ratings.csv"
        log.write_text("userId,movieId,rating,timestamp\n1,2,4.0,1600000000\n1,3,1.0,1600000001\n")
        ended = CliRunner().invoke(app, ["check", str(model), "--device", "cpu", "--interactions", str(log)])
        assert ended.exit_code != 0
        assert "1 of 2 behaviours of the log have 8" in str(ended.exception)
