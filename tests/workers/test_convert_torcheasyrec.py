"""TorchEasyRec's checkpoint folder: after conversion the engine's scores equal those of the source."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from relaygr.cli.app import app
from relaygr.runtime.errors import RelayError
from relaygr.schemas.messages import Behaviours
from relaygr.worker.model.convert.conversion import convert
from relaygr.worker.model.convert.options import ConvertOptions, SourceKind
from relaygr.worker.model.convert.torcheasyrec import read_pipeline
from tests.worlds.converted import load
from tests.worlds.torcheasyrec import ITEMS, TorchEasyRec, make_torcheasyrec

QUERY_S = 1_700_000_000
CANDIDATES = np.array([3, 19, 3, 0])


def options_of(source: TorchEasyRec, folder: Path, **changes: Any) -> ConvertOptions:
    values: dict[str, Any] = {"max_prefix": 32}
    if source.full:
        np.save(folder / "makers.npy", source.makers)
        values |= {"item_features": ("item_maker",), "item_values": {"item_maker": str(folder / "makers.npy")}}
    return ConvertOptions(**(values | changes))


def history(count: int) -> Behaviours:
    random = np.random.default_rng(5)
    times = (QUERY_S - np.sort(random.integers(1, 3000, count))[::-1]) * 1000
    return Behaviours(random.integers(0, ITEMS, count), random.integers(0, 16, count).astype(np.uint16), times)


@pytest.mark.parametrize(("page_tokens", "chunk_tokens"), [(4, 512), (64, 512)])
@pytest.mark.parametrize("full", [True, False])
def test_the_engine_scores_what_the_source_scores(
    tmp_path: Path, full: bool, page_tokens: int, chunk_tokens: int
) -> None:
    source = make_torcheasyrec(full)
    folder = source.save(tmp_path)
    converted = convert(folder, SourceKind.TORCHEASYREC, options_of(source, tmp_path))
    assert converted.config.contextual_mask is full
    assert converted.tensors["items.weight"].dtype is torch.float16
    world = load(converted, page_tokens, chunk_tokens)
    features = [7, 1] if full else []
    for count in (0, 3, 13):
        behaviours = history(count)
        ours = world.scores(features, behaviours, CANDIDATES, QUERY_S * 1000)
        theirs = source.scores(features, behaviours, CANDIDATES, QUERY_S)
        assert np.abs(ours - theirs).max() <= 2e-5 * np.abs(theirs).max()


def test_what_the_tensors_and_the_pipeline_hold_needs_no_option(tmp_path: Path) -> None:
    source = make_torcheasyrec()
    folder = source.save(tmp_path)
    np.save(tmp_path / "makers.npy", source.makers)
    arguments = ["model", "convert", str(folder), str(tmp_path / "out"), "--from", "torcheasyrec"]
    asked = CliRunner().invoke(app, arguments)
    assert "--item-feature" in " ".join(asked.output.split())
    arguments += ["--item-feature", "item_maker", "--item-values", f"item_maker={tmp_path / 'makers.npy'}"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    text = " ".join(done.output.split())
    assert "0 left over, 0 missing" in text
    assert "user_id is hashed before its table" in text
    assert "Set the bit 4 in the action's code if the watch time is at least 30" in text
    useless = CliRunner().invoke(app, [*arguments, "--force", "--heads", "2"])
    assert "does not take --heads" in " ".join(useless.output.split())


def test_without_a_tensor_the_bits_of_actions_are_those_of_the_pipeline(tmp_path: Path) -> None:
    """The conversion asked for --action-weight, which it then refused."""
    source = make_torcheasyrec()
    (name,) = (name for name in source.weights if name.endswith("_combined_action_weights"))
    with_tensor = convert(source.save(tmp_path / "a"), SourceKind.TORCHEASYREC, options_of(source, tmp_path))
    del source.weights[name]
    folder = source.save(tmp_path / "b")
    converted = convert(folder, SourceKind.TORCHEASYREC, options_of(source, tmp_path))
    assert converted.config == with_tensor.config
    assert converted.config.dlrm_inputs is not None and converted.config.dlrm_inputs.action_weights == (1, 2, 4)
    pipeline = folder.parent / "pipeline.config"
    text = pipeline.read_text().replace("action_weights: [1, 2]", "").replace("watchtime_to_action_weights: [4]", "")
    pipeline.write_text(text)
    with pytest.raises(RelayError, match="add action_weights to its simple_action_encoder"):
        convert(folder, SourceKind.TORCHEASYREC, options_of(source, tmp_path))


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("slice_content_encoder {}", "pad_content_encoder {}", "pad_content_encoder gives history and candidates"),
        ("contextual_preprocessor", "contextual_interleave_preprocessor", "enable_interleaving makes tokens"),
        ("content_mlp { simple_mlp", "content_mlp { parameterized_mlp", "parameterized_mlp in content_mlp"),
        ("max_attn_len: 6", "sla_k1: 6", "semi-local attention"),
        ("attn_num_layers: 2", "attn_truncation_split_layer: 1 attn_truncation_tail_len: 9", "drops rows"),
        ("max_seq_len: 50", "max_seq_len: 50 concat_contextual_features: true", "one token of several features"),
        ("use_ln: true", "use_bn: true", "batch norms"),
        ('"nn.SiLU"', '"nn.Tanh"', "the activation 'nn.Tanh'"),
        ("l2_loss {}", "softmax_cross_entropy {}", "task watch with softmax_cross_entropy"),
        ("hash_bucket_size: 9", "zch { zch_size: 9 }", "user_id has zch"),
        ("id_feature: { feature_name", "raw_feature: { feature_name", "feature region is raw_feature"),
        ('"item_video_id" num_buckets: 20 embedding_name: "video_emb"', '"item_video_id"', "different tables"),
        ("dlrm_hstu", "ultra_hstu", "this pipeline's model is ultra_hstu"),
    ],
)
def test_a_part_without_a_counterpart_is_refused_by_name(tmp_path: Path, old: str, new: str, sentence: str) -> None:
    source = make_torcheasyrec()
    folder = source.save(tmp_path)
    text = source.pipeline()
    assert old in text
    (tmp_path / "pipeline.config").write_text(text.replace(old, new))
    with pytest.raises(RelayError, match=sentence):
        convert(folder, SourceKind.TORCHEASYREC, options_of(source, tmp_path))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("model_config {", "ends inside a message"),
        ("a: [1, 2", "ends inside a list"),
        ("a: 1\n? b", "line 1: this is not"),
        ("a: }", "a has no value"),
        ("a {" * 100, "messages in more than 64 others"),
        ("a: 1", "has no model_config"),
    ],
)
def test_a_broken_pipeline_is_refused_in_a_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "pipeline.config"
    path.write_text(text)
    with pytest.raises(RelayError, match=sentence):
        read_pipeline(path).message("model_config")


def test_a_line_of_number_signs_at_the_end_of_a_pipeline_is_a_comment(tmp_path: Path) -> None:
    """Each sign more doubled the time: 40 took hours."""
    path = tmp_path / "pipeline.config"
    path.write_text("model_config { num: 1 # one ## two\n} " + "#" * 1000, encoding="utf-8")
    assert read_pipeline(path).message("model_config").number("num", 0) == 1
    path.write_text("num: 1\n" + "# " * 1000 + "\n@", encoding="utf-8")
    with pytest.raises(RelayError, match=r"line .*: this is not protobuf's text format"):
        read_pipeline(path)


def test_without_a_pipeline_the_option_is_named(tmp_path: Path) -> None:
    source = make_torcheasyrec()
    folder = source.save(tmp_path)
    (tmp_path / "pipeline.config").unlink()
    with pytest.raises(RelayError, match="--pipeline"):
        convert(folder, SourceKind.TORCHEASYREC, options_of(source, tmp_path))
