"""`relaygr vectors`: every kind and option is computed as an independent implementation computes it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from relaygr.cli.app import app
from relaygr.runtime.errors import RelayError
from relaygr.worker.model.vectors import KINDS, CaseResult, CaseVerdict, VectorCase, check_case, read_vectors
from tests.workers.vector_models import make_dlrm, make_research
from tests.worlds.vectors import Made, make_cached, make_mask, make_nv, make_pos, make_stu, write

CASES: dict[str, Callable[[], Made]] = {
    "stu_plain": make_stu,
    "stu_group_norm": lambda: make_stu(group_norm=True),
    "stu_alpha": lambda: make_stu(attn_alpha=0.9),
    "stu_not_target_aware": lambda: make_stu(target_aware=False),
    "stu_contextual": lambda: make_stu(contextual_seq_len=2),
    "stu_window": lambda: make_stu(max_attn_len=3),
    "stu_window_exempt": lambda: make_stu(max_attn_len=2, min_full_attn_seq_len=3),
    "stu_all": lambda: make_stu(contextual_seq_len=2, max_attn_len=3, min_full_attn_seq_len=2, group_norm=True),
    "stu_contextual_window": lambda: make_stu(contextual_seq_len=3, max_attn_len=2),
    "stu_not_target_aware_window": lambda: make_stu(target_aware=False, max_attn_len=4),
    "stu_not_target_aware_exempt": lambda: make_stu(target_aware=False, max_attn_len=2, min_full_attn_seq_len=3),
    "stu_not_target_aware_contextual": lambda: make_stu(target_aware=False, contextual_seq_len=2, attn_alpha=0.3),
    "cached_plain": make_cached,
    "cached_group_norm": lambda: make_cached(group_norm=True, attn_alpha=0.7),
    "cached_window": lambda: make_cached(max_attn_len=3),
    "cached_contextual": lambda: make_cached(suffix=0, contextual_seq_len=2),
    "cached_all": lambda: make_cached(suffix=0, contextual_seq_len=3, max_attn_len=4, min_full_attn_seq_len=2),
    "cached_contextual_grown": lambda: make_cached(suffix=2, contextual_seq_len=2),
    "cached_not_target_aware": lambda: make_cached(suffix=2, target_aware=False),
    "cached_not_target_aware_contextual": lambda: make_cached(suffix=0, target_aware=False, contextual_seq_len=2),
    "mask_plain": make_mask,
    "mask_contextual": lambda: make_mask(contextual=3),
    "mask_window": lambda: make_mask(window=4),
    "mask_all": lambda: make_mask(contextual=2, window=3, exempt=2),
    "mask_not_target_aware": lambda: make_mask(contextual=2, window=3, exempt=2, target_aware=False),
    "pos_sqrt": make_pos,
    "pos_log": lambda: make_pos(fn="log"),
    "pos_contextual": lambda: make_pos(contextual=2),
    "pos_contextual_log": lambda: make_pos(contextual=3, fn="log", unit=7.5),
    "nv_plain": make_nv,
    "nv_groups": lambda: make_nv(group=2, scaling=50),
    "nv_contextual": lambda: make_nv(contextuals=(2,)),
    "nv_contextual_per_user": lambda: make_nv(group=3, contextuals=(2, 0, 4)),
    "nv_no_targets": lambda: make_nv(contextuals=(2, 0, 4), with_targets=False),
    "nv_no_contextuals": lambda: make_nv(contextuals=()),
    "research_plain": make_research,
    "research_concat": lambda: make_research(concat_ua=True),
    "research_concat_before_norm": lambda: make_research(concat_ua=True, middle_norm=False),
    "research_few_buckets": lambda: make_research(buckets=3),
    "dlrm_layernorm": make_dlrm,
    "dlrm_query_time": lambda: make_dlrm(post="timestamp+layernorm"),
    "dlrm_features": lambda: make_dlrm(features=3, contextual=()),
    "dlrm_several_tokens": lambda: make_dlrm(several=3),
    "dlrm_contextual_mask": lambda: make_dlrm(several=2, masked=True, features=2),
    "dlrm_group_norm": lambda: make_dlrm(group_norm=True, contextual=("region", "country", "user_id")),
    "dlrm_default_eps": lambda: make_dlrm(post_ln_eps="module default"),
    "dlrm_swish_eps": lambda: make_dlrm(swish_ln_eps=0.01),
    "dlrm_window": lambda: make_dlrm(max_attn_len=3, min_full_attn_seq_len=2, attn_alpha=0.9),
    "dlrm_query_time_today": lambda: make_dlrm(post="timestamp+layernorm", since=1_700_000_000, spread=5_000),
}
EXPECTED = {
    "stu": "y",
    "cached": "v_cache",
    "mask": "mask",
    "pos": "out",
    "nv": "out",
    "research": "y",
    "dlrm": "preds",
}


def checked(name: str, made: Made) -> CaseResult:
    options, arrays = made
    return check_case(VectorCase(name, options, arrays), KINDS)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_an_option_gives_what_its_definition_says(name: str) -> None:
    result = checked(name, CASES[name]())
    assert result.verdict is CaseVerdict.PASSED, result


@pytest.mark.parametrize(
    "name", ["stu_plain", "cached_plain", "mask_all", "pos_log", "nv_groups", "research_plain", "dlrm_layernorm"]
)
def test_one_wrong_value_fails_its_case(name: str) -> None:
    options, arrays = CASES[name]()
    array = arrays[EXPECTED[name.partition("_")[0]]].copy()
    place = np.unravel_index(array.size // 2, array.shape)
    array[place] = not array[place] if array.dtype == bool else array[place] + np.abs(array).max() * 1e-4
    result = checked(name, (options, arrays | {EXPECTED[name.partition("_")[0]]: array}))
    assert result.verdict is CaseVerdict.FAILED
    assert result.worst_error > 2e-5


def test_nan_fails_its_case() -> None:
    options, arrays = make_dlrm()
    arrays["preds"][0, 0] = np.nan
    result = checked("dlrm_x", (options, arrays))
    assert (result.verdict, result.worst_array) == (CaseVerdict.FAILED, "preds in pages of 4")


def test_whole_numbers_may_be_stored_as_floats_and_fractions_are_refused() -> None:
    options, arrays = make_pos()
    stamps = arrays["timestamps"].astype(np.float64)
    assert checked("pos_x", (options, arrays | {"timestamps": stamps})).verdict is CaseVerdict.PASSED
    for wrong in (stamps + 0.5, np.full(stamps.size, np.inf), stamps.astype(str)):
        result = checked("pos_x", (options, arrays | {"timestamps": wrong}))
        assert (result.verdict, "not whole numbers" in result.detail) == (CaseVerdict.FAILED, True)


def test_without_targets_positions_of_padding_do_not_count() -> None:
    options, arrays = make_pos(with_targets=False)
    arrays["num_targets"] = np.array([])
    assert checked("pos_x", (options, arrays)).verdict is CaseVerdict.PASSED
    arrays["pos_index"][0, 0] += 1
    assert checked("pos_x", (options, arrays)).verdict is CaseVerdict.FAILED


def test_a_whole_model_may_hold_maps_of_no_contextual_token_and_no_bits_of_actions() -> None:
    options, arrays = make_dlrm(contextual=())
    pre = "w/_hstu_transducer._input_preprocessor."
    arrays[f"{pre}_batched_contextual_linear_weights"] = np.zeros((0, 7, 6), np.float32)
    arrays[f"{pre}_batched_contextual_linear_bias"] = np.zeros((0, 6), np.float32)
    del arrays["w/buffer/_hstu_transducer._input_preprocessor._action_encoder._combined_action_weights"]
    assert checked("dlrm_x", (options, arrays)).verdict is CaseVerdict.PASSED


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        ("stu_plain", "rotary", True),
        ("nv_plain", "softmax", 1),
        ("pos_sqrt", "fn", "cube"),
        ("dlrm_layernorm", "post", "rms"),
    ],
)
def test_an_option_that_is_not_known_is_named_and_never_guessed(name: str, option: str, value: object) -> None:
    options, arrays = CASES[name]()
    result = checked(name, (options | {option: value}, arrays))
    assert result.verdict is CaseVerdict.NOT_UNDERSTOOD
    assert option in result.detail


def test_an_option_that_is_not_known_but_off_changes_nothing() -> None:
    options, arrays = make_stu()
    assert checked("stu_x", (options | {"rotary": False, "window": None}, arrays)).verdict is CaseVerdict.PASSED


def test_a_kind_that_is_not_known_is_not_understood() -> None:
    result = checked("mamba_plain", make_stu())
    assert result.verdict is CaseVerdict.NOT_UNDERSTOOD
    assert "stu_*" in result.detail


@pytest.mark.parametrize("missing", ["x", "w/layer1._uvqk_weight", "y"])
def test_an_array_that_is_missing_fails_its_case_by_name(missing: str) -> None:
    options, arrays = make_stu()
    del arrays[missing]
    result = checked("stu_x", (options, arrays))
    assert (result.verdict, result.detail) == (CaseVerdict.FAILED, f"{missing} is missing")


def test_sizes_that_contradict_each_other_fail_their_case() -> None:
    options, arrays = make_stu()
    short = checked("stu_x", (options, arrays | {"lengths": np.array([1, 2])}))
    assert "lengths add up to 3" in short.detail
    heads = checked("stu_x", (options | {"num_heads": 3}, arrays))
    assert heads.verdict is CaseVerdict.FAILED
    assert checked("stu_x", (options | {"num_heads": 0}, arrays)).verdict is CaseVerdict.FAILED
    text = checked("stu_x", (options | {"num_layers": "two"}, arrays))
    assert "num_layers is 'two'" in text.detail
    targets = checked("stu_x", (options, arrays | {"num_targets": arrays["lengths"] + 1}))
    assert "do not fit lengths" in targets.detail


def test_the_command_prints_a_line_a_case_and_exits_with_the_worst(tmp_path: Path) -> None:
    good, wrong, strange = make_stu(), make_mask(), make_nv()
    wrong[1]["mask"][0, 0, 0] = False
    strange[0]["softmax"] = True

    def run(**cases: Made) -> tuple[int, str]:
        path = write(tmp_path / "vectors.npz", cases)
        done = CliRunner().invoke(app, ["vectors", str(path)])
        return done.exit_code, done.output

    code, output = run(stu_a=good)
    assert code == 0
    assert "1 of 1 passed" in output
    assert run(stu_a=good, nv_b=strange)[0] == 2
    code, output = run(stu_a=good, nv_b=strange, mask_c=wrong)
    assert code == 1
    lines = {line.split()[0]: line for line in output.splitlines() if line}
    assert "passed" in lines["stu_a"]
    assert "softmax=True" in lines["nv_b"]
    assert "1 of 576 differ" in lines["mask_c"]


def test_a_file_without_vectors_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file.npz"
    with pytest.raises(RelayError, match="cannot be read"):
        read_vectors(path)
    path.write_bytes(b"text")
    with pytest.raises(RelayError, match=r"not an \.npz file"):
        read_vectors(path)
    np.savez(path, x=np.zeros(3))
    with pytest.raises(RelayError, match=r"has no meta\.json"):
        read_vectors(path)
    np.savez(path, **{"meta.json": np.array("{broken")})
    with pytest.raises(RelayError, match="cannot be read"):
        read_vectors(path)
    np.savez(path, **{"meta.json": np.array('{"a": 1}')})
    with pytest.raises(RelayError, match="object of objects"):
        read_vectors(path)
    np.savez(path, **{"meta.json": np.array("{}"), "loose": np.zeros(2)})
    with pytest.raises(RelayError, match="belongs to no case"):
        read_vectors(path)
    np.savez(path, **{"meta.json": np.array("{}")})
    with pytest.raises(RelayError, match="holds no case"):
        read_vectors(path)
    whole = write(path, {"stu_a": make_stu()}).read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(RelayError, match=r"not an \.npz file, or is truncated"):
        read_vectors(path)


@pytest.mark.slow
@pytest.mark.skipif("RELAYGR_TEST_VECTORS" not in os.environ, reason="RELAYGR_TEST_VECTORS names no file")
def test_the_vectors_of_other_implementations_pass() -> None:
    for case in read_vectors(Path(os.environ["RELAYGR_TEST_VECTORS"])):
        result = check_case(case, KINDS)
        assert result.verdict is CaseVerdict.PASSED, result
