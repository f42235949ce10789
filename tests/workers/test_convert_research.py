"""The research model's state dict: after conversion candidates get the rows of its layers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from relaygr.runtime.errors import RelayError
from relaygr.schemas.messages import Behaviours
from relaygr.worker.model.convert.conversion import convert_state_dict
from relaygr.worker.model.convert.options import ConvertOptions, SourceKind
from relaygr.worker.model.convert.state_dict import StateDict
from relaygr.worker.model.options import Task, TaskKind
from tests.workers.vector_models import make_research, research_rows
from tests.worlds.converted import Tensors, load, tensors

D, SIZE, ITEMS = 6, 10, 15
QUERY_S = 2_000_000


def options_of(**changes: Any) -> ConvertOptions:
    tasks = tuple(Task(name=f"t{k}", kind=TaskKind.REGRESSION) for k in range(2))
    return ConvertOptions(**({"heads": 2, "normalizer": 10.0, "tasks": tasks, "max_prefix": 16} | changes))


def source_of(concat_ua: bool) -> tuple[Tensors, dict[str, Any]]:
    """A state dict, and its arrays: the layers of a case, tables, and a read-out under our own names."""
    arrays = make_research(concat_ua)[1]
    random = np.random.default_rng(5)
    found = {f"_hstu.{name.removeprefix('w/')}": array for name, array in arrays.items() if name.startswith("w/")}
    found["_embedding_module._item_emb.weight"] = random.normal(size=(ITEMS, D)).astype(np.float32)
    found["_input_features_preproc._pos_emb.weight"] = random.normal(size=(SIZE, D)).astype(np.float32)
    found["_attn_mask"] = np.triu(np.ones((SIZE, SIZE), bool), 1)
    found["readout.mlp.0.weight"] = random.normal(size=(D, 2)).astype(np.float32)
    found["readout.mlp.0.bias"] = random.normal(size=2).astype(np.float32)
    return tensors(found), found


@pytest.mark.parametrize("concat_ua", [False, True])
@pytest.mark.parametrize(("page_tokens", "chunk_tokens"), [(4, 3), (64, 512)])
def test_the_engine_scores_what_the_source_scores(concat_ua: bool, page_tokens: int, chunk_tokens: int) -> None:
    state, w = source_of(concat_ua)
    converted = convert_state_dict(StateDict(state), SourceKind.RESEARCH, options_of(concatenated=concat_ua), "here")
    assert converted.config.output_form.blocks == (3 if concat_ua else 1)
    history = np.array([3, 1, 4, 1, 5, 9, 2])
    times = np.sort(np.random.default_rng(6).integers(0, 10**6, history.size))
    candidates = np.array([6, 14, 3])
    behaviours = Behaviours(history, np.zeros(history.size, np.uint16), times * 1000)
    world = load(converted, page_tokens, chunk_tokens)
    ours = world.scores([], behaviours, candidates, QUERY_S * 1000)

    prefix = "_hstu._attention_layers."
    names = ("_uvqk", "_rel_attn_bias._ts_w", "_rel_attn_bias._pos_w", "_o.weight", "_o.bias")
    layers = [{name: w[f"{prefix}{k}.{name}"] for name in names} for k in range(2)]
    # Each candidate is the next and last item of the sequence, at the query's time.
    stamps = np.full(SIZE, QUERY_S)
    stamps[: history.size] = times
    expected = []
    for candidate in candidates:
        items = np.append(history, candidate)
        x = w["_embedding_module._item_emb.weight"][items] * D**0.5
        x = x + w["_input_features_preproc._pos_emb.weight"][: items.size]
        row = research_rows(x, stamps, layers, 2, SIZE, concat_ua)[-1]
        expected.append(row / np.linalg.norm(row) @ w["readout.mlp.0.weight"] + w["readout.mlp.0.bias"])
    assert np.abs(ours - np.array(expected)).max() <= 2e-5 * np.abs(expected).max()


def test_the_option_for_three_blocks_is_required_only_if_shapes_do_not_decide() -> None:
    state, _ = source_of(concat_ua=True)
    # [6, 24] can be 3 blocks of 8, and no block of 24: the projection is 32 wide.
    converted = convert_state_dict(StateDict(state), SourceKind.RESEARCH, options_of(), "here")
    assert converted.config.output_form.blocks == 3
    wide = {name: t for name, t in state.items() if "_uvqk" not in name and "_o.weight" not in name}
    for k in range(2):
        wide[f"_hstu._attention_layers.{k}._uvqk"] = torch.zeros(D, 32)
        wide[f"_hstu._attention_layers.{k}._o.weight"] = torch.zeros(D, 12)
    with pytest.raises(RelayError, match=r"--concatenated \(or --not-concatenated: "):
        convert_state_dict(StateDict(wide), SourceKind.RESEARCH, options_of(), "here")


def test_a_read_out_that_the_source_lacks_is_missing() -> None:
    state = {name: t for name, t in source_of(concat_ua=False)[0].items() if not name.startswith("readout")}
    report = convert_state_dict(StateDict(state), SourceKind.RESEARCH, options_of(), "here").report
    assert [missing.target for missing in report.missing] == ["readout.mlp.0.weight", "readout.mlp.0.bias"]
    assert not report.left_over


def test_the_causal_mask_proves_n() -> None:
    state, _ = source_of(concat_ua=False)
    with pytest.raises(RelayError, match="--normalizer 11: the source divides by 10, the rows of _attn_mask"):
        convert_state_dict(StateDict(state), SourceKind.RESEARCH, options_of(normalizer=11.0), "here")
    (note,) = convert_state_dict(StateDict(state), SourceKind.RESEARCH, options_of(), "here").report.notes
    assert "--heads 2" in note and "--normalizer" not in note
