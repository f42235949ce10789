"""`relaygr model check`: each rule that a ranker breaks is found, and only that one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from relaygr.cli.app import app
from relaygr.worker import type_check
from relaygr.worker.kv import KvDtype
from relaygr.worker.model.checkpoint import random_checkpoint, save_checkpoint
from relaygr.worker.model.config import PrefixRules
from relaygr.worker.model.engine import engine_to_check, load_engine
from relaygr.worker.model.options import ComputeDtype
from relaygr.worker.model.rankers import RECORD_FILE, read_record
from relaygr.worker.model_check import Finding, ModelCheck, Rule, rules_found
from relaygr.worker.score_error import made_sample
from tests.worlds.model import small_config
from tests.worlds.toy_rankers import ITEMS, MODULE, write_folder

TO_THE_END = ("--minutes", "30")
"""All comparisons with a few users, on the slowest machine, too."""


def findings_of(folder: Path, seconds: float = 1.0) -> list[Finding]:
    engine = engine_to_check(folder, "cpu", [MODULE])
    return list(ModelCheck(engine, *made_sample(engine, 4), seconds).run())


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("Decoder", set()),
        ("WritesIntoWhatItIsGiven", set()),
        ("SeesLaterRows", {Rule.CHUNKS, Rule.GROWS, Rule.SUFFIX}),
        ("CountsFromTheEnd", {Rule.GROWS, Rule.SUFFIX}),
        ("ReadsTheTime", {Rule.QUERY_TIME}),
        ("ComparesCandidates", {Rule.CANDIDATES}),
        ("IgnoresTheSuffix", {Rule.SUFFIX}),
        ("IgnoresTheHistory", {Rule.HISTORY}),
        ("IsNotFinite", None),
        ("DrawsLots", None),
        ("Learns", {Rule.UNCHANGED}),
    ],
)
def test_each_broken_rule_is_named_with_its_smallest_case(tmp_path: Path, name: str, broken: set[Rule] | None) -> None:
    found = {each.rule: each for each in findings_of(write_folder(tmp_path, name))}
    assert set(found) == set(Rule)
    assert all(each.tried for each in found.values())
    failed = {rule for rule, each in found.items() if not each.holds}
    if broken is None:
        assert failed & {Rule.FINITE, Rule.DETERMINISTIC}
        return
    assert failed == broken, {rule: found[rule] for rule in failed}
    for rule in broken - {Rule.UNCHANGED, Rule.HISTORY}:
        smallest = found[rule].smallest
        assert smallest is not None
        assert int(smallest.split()[0]) <= 5


def test_whatever_the_time_each_rule_is_tried_with_some_behaviours(tmp_path: Path) -> None:
    """A history of one behaviour has no part that could have been computed before."""
    found = {each.rule: each for each in findings_of(write_folder(tmp_path, "CountsFromTheEnd"), seconds=0)}
    grows, chunks = found[Rule.GROWS], found[Rule.CHUNKS]
    assert (grows.smallest, grows.holds) == ("2 behaviours", False)
    assert grows.case.startswith("with 2 behaviours scores differ by ")
    assert (chunks.holds, chunks.tried, chunks.longest) == (True, 5, 8)


def test_the_rules_of_our_own_layers_hold(tmp_path: Path) -> None:
    config = small_config()
    save_checkpoint(tmp_path, config, random_checkpoint(config, 0).tensors)
    found = findings_of(tmp_path)
    assert {each.rule for each in found} == set(Rule)
    assert all(each.holds for each in found)
    assert rules_found(found) == PrefixRules()


def test_a_ranker_that_takes_no_suffix_may_grow(tmp_path: Path) -> None:
    found = findings_of(write_folder(tmp_path, "TakesNoSuffix"))
    assert Rule.SUFFIX not in {each.rule for each in found}
    assert rules_found(found) == PrefixRules()


def test_a_rule_that_is_not_claimed_is_not_tried(tmp_path: Path) -> None:
    features = {"position_origin": "end", "num_positions": 300}
    config = small_config(**features)
    save_checkpoint(tmp_path, config, random_checkpoint(config, 0).tensors)
    found = findings_of(tmp_path)
    assert not {Rule.GROWS, Rule.SUFFIX} & {each.rule for each in found}
    assert rules_found(found) == PrefixRules(grows=False)


class TestCommand:
    def check(self, folder: Path, *arguments: str) -> tuple[int, str]:
        command = ["model", "check", str(folder), "--ranker-module", MODULE, "--minutes", "0.05", *arguments]
        done = CliRunner().invoke(app, command)
        return done.exit_code, " ".join(done.output.split())

    def test_what_is_found_is_written_beside_the_ranker_and_served(self, tmp_path: Path) -> None:
        write_folder(tmp_path, "CountsFromTheEnd")
        code, said = self.check(tmp_path)
        assert code == 0, said
        assert "can be served; the relay computes a prefix anew for each impression" in said
        assert "the window slides" not in said
        assert read_record(tmp_path).rules == PrefixRules(grows=False)
        assert load_engine(tmp_path, "cpu", KvDtype.FLOAT32, ranker_modules=[MODULE]).rules == PrefixRules(grows=False)

    def test_the_relay_does_not_pay_for_scores_that_read_no_history(self, tmp_path: Path) -> None:
        """A port that forgot them would pass all comparisons: both ways to a score would forget them."""
        code, said = self.check(write_folder(tmp_path, "IgnoresTheHistory"))
        assert code == 0, said
        assert "scores depend on the history │ broken at every history" in said
        assert "can be served; the relay does not pay: no score depends on the history." in said

    def test_it_says_from_which_length_on_later_visits_find_nothing(self, tmp_path: Path) -> None:
        _, said = self.check(write_folder(tmp_path))
        assert "Past 96 behaviours the window slides: the oldest are left out 24 at a time" in said
        assert "each time there is no reuse across visits" in said

    def test_a_new_ranker_is_checked_on_the_histories_of_a_log(self, tmp_path: Path) -> None:
        folder, log = write_folder(tmp_path / "model"), tmp_path / "log.csv"
        rows = [f"u{user},{(user + 7 * at) % ITEMS},{at}" for user in range(4) for at in range(20)]
        log.write_text("\n".join(["user_id,item_id,timestamp_ms", *rows]))
        code, said = self.check(folder, "--interactions", str(log))
        assert code == 0, said
        assert read_record(folder).rules == PrefixRules()

    def test_a_log_whose_items_the_ranker_does_not_know_is_refused(self, tmp_path: Path) -> None:
        """All items would be the unknown one, whose scores say nothing."""
        folder, log = write_folder(tmp_path / "model"), tmp_path / "log.csv"
        log.write_text("user_id,item_id,timestamp_ms\nann,sku-1,1\nann,sku-2,2\nann,3,3\n")
        code, said = self.check(folder, "--interactions", str(log))
        assert code == 1
        assert "2 of 3 behaviours are of items that" in said and "--item-map" in said

    def test_a_log_with_event_names_is_read_by_their_codes_and_bad_lines_are_said(self, tmp_path: Path) -> None:
        folder, log = write_folder(tmp_path / "model"), tmp_path / "log.csv"
        rows = [f"ann,{at},view,{at}" for at in range(8)]
        log.write_text("\n".join(["user_id,item_id,event,timestamp_ms", *rows]))
        read_as = ("--interactions", str(log), "--columns", "action=event")
        code, said = self.check(folder, *read_as)
        assert code == 1
        assert "contains no interactions. 8 lines are left out as bad; the first is line 2: action is 'view'" in said
        log.write_text("\n".join(["user_id,item_id,event,timestamp_ms", "ann,,view,5", *rows]))
        code, said = self.check(folder, *read_as, "--actions", "view=1")
        assert code == 0, said
        assert "Note: 1 lines are left out as bad; the first is line 2: " in said
        assert "up to 8 behaviours" in said

    def test_a_ranker_that_can_not_be_served_has_no_record(self, tmp_path: Path) -> None:
        write_folder(tmp_path, "DrawsLots")
        code, said = self.check(tmp_path)
        assert code == 1
        assert "can not be served: it is not so that the same request has the same scores" in said
        assert not (tmp_path / RECORD_FILE).exists()

    def test_what_the_rankers_code_raises_is_one_sentence(self, tmp_path: Path) -> None:
        write_folder(tmp_path, "HasTooFewScores")
        code, said = self.check(tmp_path)
        assert code == 1
        assert "HasTooFewScores.rank returned scores" in said
        assert "Traceback" not in said

    def test_a_ranker_that_raises_for_an_item_that_it_does_not_know_is_told_so(self, tmp_path: Path) -> None:
        """It passed, and the worker refused it at its start with the words of the look-up alone."""
        code, said = self.check(write_folder(tmp_path, "HasNoRowForUnknownItems"))
        assert code == 1
        assert "prefix raised IndexError: index out of range in self. It was given what it does not know" in said
        assert "give what is unknown a row of its own" in said

    @pytest.mark.usefixtures("exact_int8")
    def test_without_a_given_type_each_is_measured_and_what_can_not_run_is_said(self, tmp_path: Path) -> None:
        limits = ("--max-score-error", "0", "--users", "2")
        code, said = self.check(write_folder(tmp_path), "--device", "cpu", *limits, *TO_THE_END)
        assert code == 0, said
        for text in (
            "K,V bfloat16, compared with float32 │ beyond the limits",
            "K,V int8, compared with float32 │ beyond the limits",
            "K,V float8, compared with float32 │ beyond the limits",
            "K,V bfloat16 in DRAM, compared with float32 as on the device │ beyond the limits",
            "K,V int8 in DRAM, compared with float32 as on the device │ beyond the limits",
            "products in bfloat16, compared with float32 │ beyond the limits",
            "products in int8, compared with float32 │ not measured: compute_dtype int8 is of our own layers",
        ):
            assert text in said
        assert "can be served; the relay" in said

    def test_histories_of_a_log_are_taken_before_anything_is_written_beside_the_ranker(self, tmp_path: Path) -> None:
        log = tmp_path / "ratings.csv"
        rows = [f"{user},{(7 * user + at) % 60},1.0,{1_600_000_000 + at}" for user in range(5) for at in range(20)]
        log.write_text("\n".join(["userId,movieId,rating,timestamp", *rows]) + "\n")
        arguments = ["--interactions", str(log), "--device", "cpu", "--kv-dtype", "bfloat16", "--max-score-error", "1"]
        code, said = self.check(write_folder(tmp_path / "model"), *arguments, *TO_THE_END)
        assert code == 0, said
        assert "up to 20 behaviours" in said
        assert "within the limits, 5 users, 32 candidates each" in said

    @pytest.mark.usefixtures("exact_int8")
    def test_a_given_type_that_can_not_run_fails_the_check(self, tmp_path: Path) -> None:
        code, said = self.check(write_folder(tmp_path), "--device", "cpu", "--compute-dtype", "int8")
        assert code == 1
        assert "not measured: compute_dtype int8 is of our own layers" in said
        assert "can be served, but not with worker.compute_dtype int8; the relay" in said

    def test_a_ranker_that_cannot_run_in_the_default_type_of_the_device_fails_the_check(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The last line said that it can be served, and a worker on a GPU would not have started."""
        monkeypatch.setattr(type_check, "default_dtypes", lambda _: (KvDtype.BFLOAT16, ComputeDtype.BFLOAT16))
        code, said = self.check(write_folder(tmp_path, "NeedsFloat32"))
        assert code == 1
        assert "can be served, but not with worker.compute_dtype bfloat16; the relay" in said

    def test_a_model_that_is_refused_is_tried_in_no_type(self, tmp_path: Path) -> None:
        _, said = self.check(write_folder(tmp_path, "DrawsLots"), "--kv-dtype", "int8")
        assert "Types in fewer bits were not tried, since the model is refused." in said

    def test_a_rule_that_is_not_claimed_is_said_to_be_not_tried(self, tmp_path: Path) -> None:
        config = small_config(position_origin="end", num_positions=300)
        save_checkpoint(tmp_path, config, random_checkpoint(config, 0).tensors)
        code, said = self.check(tmp_path, "--device", "cpu", "--kv-dtype", "bfloat16")
        assert code == 0, said
        assert "a history that grew keeps its K,V │ not tried: the model does not claim it" in said
        assert "a prefix may be computed in chunks │ holds" in said

    def test_json_has_the_findings_the_rules_the_times_and_the_types(self, tmp_path: Path) -> None:
        write_folder(tmp_path, "ReadsTheTime")
        command = ["model", "check", str(tmp_path), "--ranker-module", MODULE, "--minutes", "0.05", "--device", "cpu"]
        done = CliRunner().invoke(app, [*command, "--kv-dtype", "int8", "--min-topk-overlap", "0.1", "--json"])
        found = json.loads(done.stdout)
        assert found["rules"] == {"grows": True, "chunks": True, "uses_query_time": True}
        assert [each["rule"] for each in found["findings"] if not each["holds"]] == ["query_time"]
        assert all(0 < each["longest"] <= 96 for each in found["findings"])
        assert found["not_tried"] == []
        assert found["window"] == {"behaviours": 96, "step": 24}
        assert 0 < found["times"]["hit_ms"] < found["times"]["full_inference_ms"]
        [measured] = found["types"]
        assert (measured["setting"], measured["dtype"], measured["exact"]) == ("kv_dtype", "int8", "float32")
        assert measured["error"]["max_score_error"] > 0
        assert measured["limits"] == {"max_score_error": 0.01, "min_topk_overlap": 0.1}
        assert measured["within_limits"] == (measured["error"]["max_score_error"] <= 0.01)
