"""`relaygr model init --preset`: models of well-known forms and of any size, whose scores equal the oracle's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from relaygr.cli.model import app
from relaygr.schemas.messages import Behaviours
from relaygr.worker.device import CpuDevice
from relaygr.worker.kv import KvDtype
from relaygr.worker.model.checkpoint import Checkpoint, load_checkpoint
from relaygr.worker.model.engine import build_engine
from relaygr.worker.model.interface import PrefixChunk
from relaygr.worker.model.options import Activated, Family, InputForm, Preset, ReadoutForm
from tests.worlds.dense import full_inference
from tests.worlds.model import random_behaviours

SIZES = "--dim 16 --layers 2 --heads 2 --vocabulary 40 --max-prefix 64 --max-suffix 8"
FEATURES = np.array([3])


def made(out: Path, options: str) -> Checkpoint:
    done = CliRunner().invoke(app, f"init {out} {SIZES} --feature country=9 {options}")
    assert done.exit_code == 0, done.output
    return load_checkpoint(out)


@pytest.mark.parametrize("preset", Preset)
def test_a_preset_is_a_model_that_scores_as_the_oracle_says(preset: Preset, tmp_path: Path) -> None:
    checkpoint = made(tmp_path / "model", f"--preset {preset} --task click --task watch:regression")
    engine = build_engine(checkpoint, CpuDevice(), KvDtype.FLOAT32, 8)
    history, candidates = random_behaviours(np.random.default_rng(0), 64), np.arange(9)
    inputs = engine.prefix_inputs(FEATURES, history, 90_000)
    pages = np.arange(engine.geometry.pages_for(inputs.tokens), dtype=np.int32)
    engine.bind(torch.zeros((pages.size, engine.geometry.page_bytes), dtype=torch.uint8))
    engine.pre_infer(PrefixChunk(inputs, 0, inputs.tokens, pages))
    request = engine.rank_inputs(
        inputs.tokens, pages, Behaviours.empty(), candidates, 90_000, prefix_timestamps_ms=history.timestamps_ms
    )
    expected = full_inference(checkpoint, FEATURES, history, candidates, 90_000).scores.numpy()
    assert np.abs(engine.rank([request])[0].scores - expected).max() <= 2e-5 * np.abs(expected).max()


def test_presets_are_the_forms_that_their_names_say(tmp_path: Path) -> None:
    configs = {preset: made(tmp_path / preset, f"--preset {preset}").config for preset in Preset}
    assert configs[Preset.DLRM_V3].readout is ReadoutForm.ITEM_PRODUCT
    assert configs[Preset.NVIDIA].inputs is InputForm.INTERLEAVED
    assert (configs[Preset.NVIDIA].normalizer, configs[Preset.NVIDIA].num_positions) == (144.0, 145)
    assert configs[Preset.RESEARCH].relative_bias is not None
    assert (configs[Preset.SOFTMAX].family, configs[Preset.SOFTMAX].normalizer) == (Family.SOFTMAX, None)


def test_an_option_goes_before_the_preset(tmp_path: Path) -> None:
    config = made(tmp_path, "--preset research --activated u --actions 5 --normalizer 30").config
    assert (config.activated, config.num_actions, config.normalizer) == (Activated.U, 5, 30.0)
    assert config.relative_bias is not None
