"""Meta's DLRM-v3 state dict: after conversion the engine's scores equal those of the source."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from relaygr.runtime.errors import RelayError
from relaygr.schemas.messages import Behaviours
from relaygr.worker.model.convert.conversion import convert_state_dict
from relaygr.worker.model.convert.options import ConvertOptions, SourceFeature, SourceKind
from relaygr.worker.model.convert.state_dict import StateDict
from relaygr.worker.model.options import Task, TaskKind
from tests.workers.vector_models import make_dlrm
from tests.worlds.converted import dlrm_state_dict, item_features, load
from tests.worlds.vectors import Made

GATE_TOKENS = 4
TASKS = (Task(name="click"), Task(name="watch", kind=TaskKind.REGRESSION))


def options_of(made: Made, **changes: Any) -> ConvertOptions:
    meta = made[0]
    values: dict[str, Any] = {
        "heads": meta["heads"],
        "normalizer": meta["N"],
        "tasks": TASKS,
        "features": tuple(
            SourceFeature(name=name, min_tokens=GATE_TOKENS if name == "user_id" else 0) for name in meta["contextual"]
        ),
        "item_features": tuple(item_features(made)[1:]),
        "max_prefix": 32,
    }
    return ConvertOptions(**(values | changes))


def own_values(made: Made) -> dict[str, torch.Tensor]:
    """Each item has the feature value of its own number."""
    count = made[1]["in/item"].shape[0] + made[1]["in/c_item"].shape[0]
    return {f"item_features.{k}.rows": torch.arange(count + 1) for k in range(len(item_features(made)) - 1)}


@pytest.mark.parametrize(("page_tokens", "chunk_tokens"), [(4, 3), (64, 512)])
@pytest.mark.parametrize(
    "made",
    [make_dlrm(), make_dlrm(post="timestamp+layernorm"), make_dlrm(features=3, contextual=())],
    ids=["layernorm", "timestamp", "item features"],
)
def test_the_engine_scores_what_the_source_scores(made: Made, page_tokens: int, chunk_tokens: int) -> None:
    arrays = made[1]
    source = dlrm_state_dict(made) | own_values(made)
    converted = convert_state_dict(StateDict(source), SourceKind.META, options_of(made), "here")
    world = load(converted, page_tokens, chunk_tokens)
    total = arrays["in/item"].shape[0]
    scores, start, asked = [], 0, 0
    for user, (history, count) in enumerate(zip(arrays["uih_lengths"], arrays["num_candidates"], strict=True)):
        h, c = slice(start, start + history), slice(asked, asked + count)
        start, asked = h.stop, c.stop
        behaviours = Behaviours(
            np.arange(h.start, h.stop),
            arrays["payload/action"][h].astype(np.uint16),
            arrays["payload/time"][h] * 1000,
        )
        features = [user for _ in made[0]["contextual"]]
        query_time_ms = int(arrays["payload/c_time"][c][0]) * 1000 + 999
        scores.append(world.scores(features, behaviours, total + np.arange(c.start, c.stop), query_time_ms))
    expected = arrays["preds"].T
    assert np.abs(np.concatenate(scores) - expected).max() <= 2e-5 * np.abs(expected).max()


def test_every_tensor_of_the_source_is_accounted_for() -> None:
    made = make_dlrm()
    source = dlrm_state_dict(made)
    report = convert_state_dict(StateDict(source), SourceKind.META, options_of(made), "here").report
    taken = {name for mapped in report.mapped for name in mapped.source.split(" + ")}
    assert taken | {unused.source for unused in report.unused} == set(source)
    assert report.is_complete
    assert {"user_id", "region"} <= {m.source.split(".")[2] for m in report.mapped if "embeddings" in m.source}
    reasons = {unused.source.split(".")[-3]: unused.why for unused in report.unused if "additional" in unused.source}
    assert "do not have" in reasons["_additional_embedding_mlp"]


def test_left_over_and_missing_tensors_are_named() -> None:
    made = make_dlrm()
    source = dlrm_state_dict(made) | {"loss.weight": torch.zeros(3)}
    del source["_hstu_transducer._stu_module._stu_layers.1._output_norm_bias"]
    report = convert_state_dict(StateDict(source), SourceKind.META, options_of(made), "here").report
    assert [left.source for left in report.left_over] == ["loss.weight"]
    assert [missing.target for missing in report.missing] == ["layers.1.output_norm.bias"]
    assert report.missing[0].looked_for.endswith("_stu_layers.1._output_norm_bias")
    assert not report.is_complete


def test_all_missing_options_are_named_at_once() -> None:
    made = make_dlrm()
    with pytest.raises(RelayError) as refusal:
        convert_state_dict(StateDict(dlrm_state_dict(made)), SourceKind.META, ConvertOptions(), "here")
    text = str(refusal.value)
    for option in ("--heads", "--normalizer", "--task", "--feature"):
        assert option in text
    assert "--item-feature" not in text


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"heads": 3}, "3 heads do not divide"),
        (
            {"features": (SourceFeature(name="user_id", min_tokens=4), SourceFeature(name="planet"))},
            "no embedding table for 'planet'",
        ),
        ({"tables": {"region": "nowhere"}}, "--table region=nowhere: the source has no such table"),
        ({"item_features": ("maker",)}, "reads 0 features beside the item"),
        ({"features": (SourceFeature(name="user_id", min_tokens=4),)}, "has 2 contextual tokens, --feature names 1"),
        ({"features": (SourceFeature(name="user_id"), SourceFeature(name="region"))}, "--hide-below"),
        ({"tasks": TASKS[:1]}, "scores 2 tasks, --task names 1"),
        ({"tasks": TASKS[::-1]}, "binary tasks first"),
    ],
)
def test_options_that_do_not_fit_are_refused_in_a_sentence(changes: dict[str, Any], sentence: str) -> None:
    made = make_dlrm()
    with pytest.raises(RelayError, match=sentence):
        convert_state_dict(StateDict(dlrm_state_dict(made)), SourceKind.META, options_of(made, **changes), "here")


def test_group_norm_proves_the_number_of_heads() -> None:
    made = make_dlrm(group_norm=True)
    with pytest.raises(RelayError, match="--heads 1: the norms of the source have one weight for each of 2 heads"):
        convert_state_dict(StateDict(dlrm_state_dict(made)), SourceKind.META, options_of(made, heads=1), "here")


def test_options_that_no_tensor_proves_are_told() -> None:
    made = make_dlrm()
    source = StateDict(dlrm_state_dict(made))
    (note,) = convert_state_dict(source, SourceKind.META, options_of(made), "here").report.notes
    for told in ("--heads 2", "--normalizer 40", "--hide-below user_id=4", "order of --feature", "order of --task"):
        assert told in note
    grouped = make_dlrm(group_norm=True)
    source = StateDict(dlrm_state_dict(grouped))
    (note,) = convert_state_dict(source, SourceKind.META, options_of(grouped), "here").report.notes
    assert "--heads" not in note


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("_hstu_transducer._stu_module._stu_layers.0._output_weight", torch.zeros(24)),
        ("_hstu_transducer._input_preprocessor._content_embedding_mlp.0.weight", torch.zeros(5)),
        ("_embedding_collection.embeddings.item/other_weights", torch.zeros(13)),
        ("_hstu_transducer._input_preprocessor._action_encoder._action_embedding_table", torch.zeros(3)),
    ],
)
def test_shapes_that_no_such_model_has_are_refused_in_a_sentence(name: str, tensor: torch.Tensor) -> None:
    made = make_dlrm()
    source = dlrm_state_dict(made) | {name: tensor}
    with pytest.raises(RelayError, match="is not a state dict of meta, or the options do not fit it"):
        convert_state_dict(StateDict(source), SourceKind.META, options_of(made), "here")


def test_names_may_have_any_prefix() -> None:
    made = make_dlrm()
    source = {f"model.hstu.{name}": tensor for name, tensor in dlrm_state_dict(made).items()}
    assert convert_state_dict(StateDict(source), SourceKind.META, options_of(made), "here").report.is_complete


def test_another_model_is_not_taken_for_this_one() -> None:
    with pytest.raises(RelayError, match="not DLRM-v3"):
        convert_state_dict(StateDict({"x": torch.zeros(1)}), SourceKind.META, ConvertOptions(heads=1), "here")
