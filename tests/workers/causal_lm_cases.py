"""Decoders of `transformers` as rankers: scores beside the plain decoder, and decoders that are refused.

`test_causal_lm.py` runs these tests in a process that has the library.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from relaygr.runtime.errors import RelayError
from relaygr.schemas.messages import Behaviours
from relaygr.worker.kv import KvDtype
from relaygr.worker.measuring import bind_own_arena
from relaygr.worker.model.config import PrefixRules
from relaygr.worker.model.engine import build_engine, engine_to_check
from relaygr.worker.model.inference import FullRequest, full_inference
from relaygr.worker.model.interface import Engine
from relaygr.worker.model.options import ComputeDtype
from relaygr.worker.model.ranker_engine import RankerEngine
from relaygr.worker.model.rankers import read_ranker
from relaygr.worker.model_check import ModelCheck, rules_found
from relaygr.worker.score_error import made_sample
from tests.waiting import outcome

MODULE = "relaygr.ranker.causal_lm"
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    # What the head gives is scaled, and bounded.
    "granite": {"logits_scaling": 8.0},
    "gemma2": {"final_logit_softcapping": 0.5, "head_dim": 12, "layer_types": ["full_attention"] * 2},
}
VOCABULARY, TOKENS, ITEMS = 300, 3, 70


def write_folder(folder: Path, kind: str, *, ids: bool = False, seed: int = 0, **config: Any) -> Path:
    """A small random decoder with grouped heads."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 300,
    }
    torch.manual_seed(seed)
    made = transformers.AutoConfig.for_model(kind, **(sizes | config))
    transformers.AutoModelForCausalLM.from_config(made).save_pretrained(folder / "decoder")
    tables = {"tokens": torch.randint(0, VOCABULARY, (ITEMS, TOKENS))}
    if ids:
        tables["ids"] = torch.arange(ITEMS) * 10
    save_file(tables, folder / "items.safetensors")
    options = {"max_history": 60, "max_suffix": 8, "max_candidates": 20}
    (folder / "config.json").write_text(json.dumps({"ranker": f"{MODULE}:CausalLM", "options": options}))
    return folder


def opened(folder: Path, dtype: KvDtype = KvDtype.FLOAT32) -> Engine:
    engine = engine_to_check(folder, "cpu", [MODULE])
    assert isinstance(engine, RankerEngine) and engine.record is not None
    model = read_ranker(folder, engine.record)
    made = build_engine(model, engine.device, dtype, 16, ComputeDtype.FLOAT32, ranker_modules=[MODULE])
    bind_own_arena(made)
    return made


def scores(engine: Engine, items: np.ndarray, candidates: np.ndarray, suffix: int, chunk: int | None) -> np.ndarray:
    history = Behaviours(items, np.zeros(items.size, np.uint16), np.arange(items.size, dtype=np.int64))
    cut = items.size - suffix
    asked = FullRequest(np.empty(0, np.int64), history[:cut], candidates, 0, history[cut:])
    pages = np.arange(engine.geometry.pages_for(engine.layout.tokens(60)), dtype=np.int32)
    return full_inference(engine, asked, pages, chunk).outputs.scores.ravel()


def log_likelihoods(folder: Path, rows: np.ndarray, candidates: np.ndarray) -> np.ndarray:
    """By the plain decoder, without a cache, one candidate after the other."""
    import transformers

    decoder = transformers.AutoModelForCausalLM.from_pretrained(folder / "decoder").eval()
    tokens = load_file(folder / "items.safetensors")["tokens"]
    history = tokens[torch.from_numpy(rows)].flatten()
    found = []
    with torch.inference_mode():
        for candidate in candidates.tolist():
            chances = decoder(torch.cat((history, tokens[candidate]))[None]).logits[0].log_softmax(-1)
            found.append(sum(chances[history.numel() - 1 + at, tokens[candidate, at]].item() for at in range(TOKENS)))
    return np.array(found)


@pytest.mark.parametrize("kind", KINDS)
def test_scores_are_the_log_likelihoods_of_the_plain_decoder(tmp_path: Path, kind: str) -> None:
    folder, random = write_folder(tmp_path, kind, **KINDS[kind]), np.random.default_rng(1)
    engine = opened(folder)
    candidates = random.choice(ITEMS, 12, replace=False)
    for length, suffix, chunk in ((1, 0, None), (1, 1, None), (40, 0, 7), (40, 8, 17), (60, 0, None)):
        rows = random.integers(0, ITEMS, length)
        wanted = log_likelihoods(folder, rows, candidates)
        found = scores(engine, rows, candidates, suffix, chunk)
        assert np.abs(found - wanted).max() < 1e-5, (length, suffix, chunk)


@pytest.mark.parametrize("dtype", [each for each in KvDtype if each is not KvDtype.FLOAT32])
def test_in_fewer_bits_the_last_token_of_the_prefix_is_the_same(tmp_path: Path, dtype: KvDtype) -> None:
    """It is the state, and another token would change the scores by more than rounding does."""
    folder, random = write_folder(tmp_path, "qwen3"), np.random.default_rng(2)
    rows, candidates = random.integers(0, ITEMS, 30), np.arange(12)
    exact = scores(opened(folder), rows, candidates, 0, None)
    rounded = scores(opened(folder, dtype), rows, candidates, 0, 11)
    assert np.abs(rounded - exact).max() < 0.1 * np.ptp(exact)


def test_all_rules_hold_and_a_user_without_a_history_is_ranked(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, "llama")
    engine = engine_to_check(folder, "cpu", [MODULE])
    found = list(ModelCheck(engine, *made_sample(engine, 2), 2).run())
    assert all(each.holds for each in found), found
    assert rules_found(found) == PrefixRules()
    assert np.isfinite(scores(opened(folder), np.empty(0, np.int64), np.arange(5), 0, None)).all()


def test_items_have_ids_of_their_own_and_unknown_ones_share_the_last_row(tmp_path: Path) -> None:
    plain, named = write_folder(tmp_path / "a", "llama"), write_folder(tmp_path / "b", "llama", ids=True)
    rows = np.arange(20)
    by_row = scores(opened(plain), rows, np.array([5, 6, ITEMS - 1]), 0, None)
    by_id = scores(opened(named), rows * 10, np.array([50, 60, 55]), 0, None)
    assert np.array_equal(by_row, by_id)
    by_unknown = scores(opened(plain), rows, np.array([5, 6, -3]), 0, None)
    assert np.array_equal(by_row, by_unknown)


class TestRefused:
    @pytest.mark.parametrize("name", ["items.safetensors", "decoder/config.json", "decoder/model.safetensors"])
    def test_a_pipe_in_place_of_a_file(self, tmp_path: Path, name: str) -> None:
        folder = write_folder(tmp_path, "llama")
        (folder / name).unlink()
        os.mkfifo(folder / name)
        error = outcome(lambda: engine_to_check(folder, "cpu", [MODULE]))
        assert isinstance(error, RelayError) and "not a regular file" in str(error)

    def test_layers_that_forget(self, tmp_path: Path) -> None:
        window = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}
        folder = write_folder(tmp_path, "qwen2", **window)
        with pytest.raises(RelayError, match="sliding_attention"):
            engine_to_check(folder, "cpu", [MODULE])

    def test_tokens_that_the_decoder_does_not_have(self, tmp_path: Path) -> None:
        folder = write_folder(tmp_path, "llama", vocab_size=100)
        with pytest.raises(RelayError, match="its vocabulary has 100"):
            engine_to_check(folder, "cpu", [MODULE])

    def test_more_behaviours_than_it_has_positions(self, tmp_path: Path) -> None:
        folder = write_folder(tmp_path, "llama", max_position_embeddings=100)
        with pytest.raises(RelayError, match="needs 207 positions"):
            engine_to_check(folder, "cpu", [MODULE])

    @pytest.mark.parametrize(
        ("name", "says"), [("_orig_mod.lm_head.weight", "missing"), ("lm_head.lora_A.default.weight", "unexpected")]
    )
    def test_weights_under_other_names(self, tmp_path: Path, name: str, says: str) -> None:
        """Those that are missing would be random, and others at each load."""
        folder = write_folder(tmp_path, "llama")
        path = folder / "decoder" / "model.safetensors"
        weights = load_file(path)
        weights[name] = weights.pop("lm_head.weight") if says == "missing" else torch.zeros(4, 48)
        save_file(weights, path, {"format": "pt"})
        with pytest.raises(RelayError, match=f"1 of its weights are {says}.*save the decoder itself"):
            engine_to_check(folder, "cpu", [MODULE])

    def test_weights_in_a_pickle(self, tmp_path: Path) -> None:
        folder = write_folder(tmp_path, "llama")
        weights = folder / "decoder" / "model.safetensors"
        torch.save(load_file(weights), folder / "decoder" / "pytorch_model.bin")
        weights.unlink()
        with pytest.raises(RelayError, match="cannot be made"):
            engine_to_check(folder, "cpu", [MODULE])
