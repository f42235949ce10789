"""A team's own ranker behind the engine: its scores, its folder, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from relaygr.ranker.interface import version_of
from relaygr.runtime.errors import RelayError
from relaygr.schemas.messages import Behaviours
from relaygr.worker.kv import KvDtype
from relaygr.worker.measuring import bind_own_arena
from relaygr.worker.model import rankers
from relaygr.worker.model.config import PrefixRules, RuleError
from relaygr.worker.model.engine import engine_to_check, load_engine, load_model, weights_identity
from relaygr.worker.model.inference import FullRequest, full_inference
from relaygr.worker.model.interface import Engine, PrefixChunk, TooLongError
from relaygr.worker.model.rankers import RECORD_FILE, RankerError, read_record
from relaygr.worker.process.trial import require_rules
from tests.worlds import toy_rankers
from tests.worlds.toy_rankers import ITEMS, MODULE, Decoder, checked, write_folder

PAGE_TOKENS = 16
NO_FEATURES = np.empty(0, np.int64)


def opened(folder: Path, dtype: KvDtype = KvDtype.FLOAT32) -> Engine:
    engine = load_engine(folder, "cpu", dtype, PAGE_TOKENS, ranker_modules=[MODULE])
    bind_own_arena(engine, 2)
    return engine


def pages_of(engine: Engine) -> np.ndarray:
    return np.arange(engine.geometry.pages_for(96), dtype=np.int32)


def request(behaviours: int, suffix: int = 0, seed: int = 0) -> FullRequest:
    random = np.random.default_rng(seed)
    history = Behaviours(
        random.integers(0, ITEMS, behaviours), np.zeros(behaviours, np.uint16), np.arange(behaviours, dtype=np.int64)
    )
    cut = behaviours - suffix
    return FullRequest(NO_FEATURES, history[:cut], random.integers(0, ITEMS, 20), 5, history[cut:])


def scores(engine: Engine, asked: FullRequest, chunk_tokens: int | None = None) -> np.ndarray:
    return full_inference(engine, asked, pages_of(engine), chunk_tokens).outputs.scores


class TestScores:
    @pytest.mark.parametrize("name", ["Decoder", "PagedDecoder"])
    @pytest.mark.parametrize("dtype", list(KvDtype))
    @pytest.mark.parametrize("behaviours", [1, 15, 16, 17, 96])
    def test_cached_scores_are_those_of_the_whole_history(
        self, tmp_path: Path, name: str, dtype: KvDtype, behaviours: int
    ) -> None:
        engine = opened(checked(tmp_path, name), dtype)
        whole = scores(engine, request(behaviours))
        spread = np.ptp(whole)
        allowed = 1e-5 if dtype is KvDtype.FLOAT32 else 0.05
        for chunk_tokens in (1, 7, 16):
            assert np.abs(scores(engine, request(behaviours), chunk_tokens) - whole).max() <= allowed * spread
        with_suffix = request(behaviours, min(behaviours - 1, 5))
        assert np.abs(scores(engine, with_suffix, 7) - whole).max() <= allowed * spread

    def test_both_forms_of_a_ranker_give_the_same_scores(self, tmp_path: Path) -> None:
        simple, paged = (opened(checked(tmp_path / name, name)) for name in ("Decoder", "PagedDecoder"))
        for asked in (request(0), request(40), request(40, 6)):
            assert np.abs(scores(simple, asked, 7) - scores(paged, asked, 7)).max() < 1e-5
        together = [
            full_inference(paged, request(30, seed=seed), np.arange(seed * 8, seed * 8 + 8, dtype=np.int32)).ranked
            for seed in (0, 1)
        ]
        for found, seed in zip(paged.rank(together), (0, 1), strict=True):
            assert np.abs(found.scores - scores(simple, request(30, seed=seed))).max() < 1e-5

    def test_a_user_without_a_history_is_ranked(self, tmp_path: Path) -> None:
        assert np.isfinite(scores(opened(checked(tmp_path)), request(0))).all()

    def test_what_a_ranker_does_to_its_inputs_changes_nothing(self, tmp_path: Path) -> None:
        kind, changing = (opened(checked(tmp_path / name, name)) for name in ("Decoder", "WritesIntoWhatItIsGiven"))
        asked = request(40)
        before = asked.prefix.items.copy()
        assert np.array_equal(scores(kind, asked, 7), scores(changing, asked, 7))
        assert np.array_equal(asked.prefix.items, before)

    def test_unknown_items_and_actions_are_counted(self, tmp_path: Path) -> None:
        engine = opened(checked(tmp_path))
        behaviours = Behaviours(np.array([1, ITEMS, -1]), np.array([0, 2, 3], np.uint16), np.arange(3))
        assert engine.prefix_inputs(NO_FEATURES, behaviours).unknown_items == 2
        assert engine.unknown_actions(behaviours) == 1
        found = engine.rank_inputs(3, pages_of(engine), behaviours[:1], np.array([5, 999]))
        assert found.unknown_items == 1

    def test_of_a_user_whose_features_are_missing_each_is_minus_one(self, tmp_path: Path) -> None:
        """A user without a history has none. A ranker would have to expect any number of them."""
        engine = opened(checked(tmp_path, "ReadsFeatures"))

        def scored(*features: int) -> list[list[float]]:
            found: list[list[float]] = scores(engine, replace(request(20), features=np.array(features, "<i8"))).tolist()
            return found

        assert scored() == scored(-1, -1) != scored(2)
        assert scored(2) == scored(2, -1) != scored(2, 3)
        assert scored(2, 3) == scored(2, 3, 4)

    def test_limits_and_rules_are_kept(self, tmp_path: Path) -> None:
        engine = opened(checked(tmp_path, rules=PrefixRules(grows=False, chunks=False)))
        with pytest.raises(TooLongError, match="97 prefix behaviours"):
            engine.prefix_inputs(NO_FEATURES, request(97).prefix)
        with pytest.raises(RuleError, match="suffix"):
            scores(engine, request(20, 3))
        with pytest.raises(RuleError, match="one chunk"):
            bound = opened(checked(tmp_path / "b", rules=PrefixRules(chunks=False)))
            inputs = bound.prefix_inputs(NO_FEATURES, request(20).prefix)
            bound.pre_infer(PrefixChunk(inputs, 0, 5, pages_of(bound)))

    @pytest.mark.parametrize(
        ("name", "says"),
        [
            ("HasTooFewScores", r"rank returned scores \[19, 1\], not \[20, 1\]"),
            ("HasTooFewRows", r"prefix returned K \[1, 19, 12\], not \[1, 20, 12\]"),
            ("LacksALayer", "K,V of 1 layers, not of 2"),
            ("ReturnsNothing", "prefix returned a NoneType in place of Computed"),
            ("LacksStates", "no states, its shape has 12 a row"),
            ("FailsForSomeItems", "rank raised ZeroDivisionError: no such item"),
            # It would end the device thread without a word.
            ("ExitsInRank", "rank raised SystemExit: no such item"),
            ("HasTooFewPagedScores", r"forward returned scores \[19, 1\], not \[20, 1\]"),
            ("RaisesInTheForward", "raised ZeroDivisionError: no such kernel"),
        ],
    )
    def test_what_does_not_fit_the_shape_is_one_sentence(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, says: str
    ) -> None:
        monkeypatch.setenv("RELAYGR_TEST_BAD_ITEM", str(request(20).candidates[0]))
        with pytest.raises(RankerError, match=rf"{MODULE}:{name}.*{says}"):
            scores(opened(checked(tmp_path, name)), request(20))


class TestFolder:
    def test_a_folder_alone_runs_no_code(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        checked(tmp_path)
        monkeypatch.setattr(rankers, "import_module", lambda name: pytest.fail(f"{name} was imported"))
        monkeypatch.setattr(rankers, "entry_points", lambda **_: pytest.fail("an entry point was looked up"))
        with pytest.raises(RelayError, match=rf"ranker_modules.*{MODULE}"):
            load_engine(tmp_path, "cpu")
        with pytest.raises(RelayError, match="ranker_modules"):
            load_engine(tmp_path, "cpu", ranker_modules=["tests.worlds", f"{MODULE}2"])
        assert load_model(tmp_path).revision

    def test_what_the_operator_lists_is_a_module_a_class_or_an_entry_point(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        checked(tmp_path)
        for listed in (MODULE, f"{MODULE}:Decoder"):
            assert load_engine(tmp_path, "cpu", ranker_modules=[listed]).backend == f"{MODULE}:Decoder"

        class Entry:
            def load(self) -> type:
                return Decoder

        monkeypatch.setattr(rankers, "entry_points", lambda group, name: [Entry()] if name == "ours" else [])
        assert rankers.ranker_class("ours", ["ours"]) is Decoder
        with pytest.raises(RelayError, match="No installed package has the entry point theirs"):
            rankers.ranker_class("theirs", ["theirs"])

    @pytest.mark.parametrize(
        ("name", "says"),
        [
            ("no_such_module:Ours", "cannot be imported: ModuleNotFoundError.*add the folder .* to PYTHONPATH"),
            (f"{MODULE}:Nobody", "cannot be imported: AttributeError"),
            (f"{MODULE}:NO_RANKER", "no subclass of relaygr.ranker.Ranker"),
            (f"{MODULE}:CannotBeMade", "cannot be made from .*KeyError: 'embedding.weight'"),
            (f"{MODULE}:ExitsWhenMade", "cannot be made from .*SystemExit: 2"),
            ("exits_at_import:Ours", "cannot be imported: SystemExit: 2"),
            (f"{MODULE}:HasNoRoomForStates", "state_dim 25: its size must be 0 to 24"),
            (f"{MODULE}:ListsItsTasks", r"the tasks \['click'\]: it must be a tuple"),
            (f"{MODULE}:ForgetsItsFolder", r"ForgetsItsFolder does not keep .*call `super\(\).__init__\(folder\)`"),
            # Batch norm would compute other scores than those that were evaluated, and the same ones each time.
            (f"{MODULE}:IsAModule", r"IsAModule\.head\.1 \(BatchNorm1d\) is in training mode.*`\.eval\(\)`"),
            (f"{MODULE}:KeepsAModule", r"KeepsAModule\.net\.mlp\.1 \(Dropout\) is in training mode"),
        ],
    )
    def test_a_ranker_that_cannot_be_opened_is_one_sentence(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, says: str
    ) -> None:
        (tmp_path / "exits_at_import.py").write_text("import sys\nsys.exit(2)\n")
        monkeypatch.syspath_prepend(tmp_path)
        write_folder(tmp_path)
        (tmp_path / "config.json").write_text(json.dumps({"ranker": name, "options": {"forgets_eval": True}}))
        with pytest.raises(RelayError, match=says):
            engine_to_check(tmp_path, "cpu", [name.partition(":")[0]])

    def test_a_ranker_may_be_a_module_itself(self, tmp_path: Path) -> None:
        alone, module = (opened(checked(tmp_path / name, name)) for name in ("Decoder", "IsAModule"))
        assert np.array_equal(scores(alone, request(20)), scores(module, request(20)))

    def test_a_ranker_that_was_not_checked_is_not_served(self, tmp_path: Path) -> None:
        write_folder(tmp_path)
        with pytest.raises(RelayError, match=r"run `relaygr model check .*first"):
            load_engine(tmp_path, "cpu", ranker_modules=[MODULE])
        (tmp_path / RECORD_FILE).write_text('{"ranker": 3}')
        with pytest.raises(RelayError, match="is broken"):
            load_engine(tmp_path, "cpu", ranker_modules=[MODULE])

    def test_code_and_sizes_are_those_that_were_checked(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        checked(tmp_path)
        monkeypatch.setattr(Decoder, "state_dim", 3)
        with pytest.raises(RelayError, match="has changed since"):
            opened(tmp_path)
        monkeypatch.undo()
        monkeypatch.setattr(Decoder, "version", "2")
        with pytest.raises(RelayError, match="has changed since"):
            opened(tmp_path)

    def test_the_revision_is_of_weights_options_and_code_and_of_nothing_else(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        first = load_model(checked(tmp_path / "a")).revision
        assert load_model(checked(tmp_path / "same")).revision == first
        for beside in ("calibration.json", "README.md", ".half.partial"):
            (tmp_path / "same" / beside).write_text("{}")
        assert load_model(tmp_path / "same").revision == first
        (tmp_path / "same" / "tokenizer").mkdir()
        (tmp_path / "same" / "tokenizer" / "vocabulary.txt").write_text("a")
        assert load_model(tmp_path / "same").revision != first
        checked(tmp_path / "weights")
        write_folder(tmp_path / "weights", seed=1)
        assert load_model(tmp_path / "weights").revision != first
        checked(tmp_path / "options")
        write_folder(tmp_path / "options", places=5)
        assert load_model(tmp_path / "options").revision != first
        monkeypatch.setattr(Decoder, "version", "2")
        assert version_of(Decoder) == "2"
        assert load_model(checked(tmp_path / "version")).revision != first

    def test_files_behind_a_link_to_a_folder_are_of_the_model(self, tmp_path: Path) -> None:
        """Such as a decoder in the cache of a hub. Its K,V would be used by other weights."""
        decoder = tmp_path / "cache"
        decoder.mkdir()
        (decoder / "model.safetensors").write_bytes(b"1")
        (decoder / "up").symlink_to(tmp_path)
        folder = checked(tmp_path / "model")
        (folder / "decoder").symlink_to(decoder)
        first, identity = load_model(folder).revision, weights_identity(folder)
        (decoder / "model.safetensors").write_bytes(b"22")
        assert load_model(folder).revision != first and weights_identity(folder) != identity

    def test_a_model_that_claims_more_than_it_keeps_is_refused_at_the_start(self, tmp_path: Path) -> None:
        require_rules(opened(checked(tmp_path / "right")), tmp_path / "right")
        bound_to_time = checked(tmp_path / "time", "ReadsTheTime", PrefixRules(uses_query_time=True))
        require_rules(opened(bound_to_time), bound_to_time)
        folder = checked(tmp_path / "wrong", "CountsFromTheEnd")
        with pytest.raises(RelayError, match=r"a history that grew keeps its K,V.*relaygr model check"):
            require_rules(opened(folder), folder)
        assert read_record(folder).rules.grows

    def test_the_toys_are_all_tried(self) -> None:
        """A ranker that nobody opens tests nothing."""
        tests = (
            Path(__file__).parents[1] / name
            for name in (
                "workers/test_rankers.py",
                "workers/test_model_check.py",
                "pipeline/test_ranker_relay.py",
                "cli/test_ranker_commands.py",
            )
        )
        text = "".join(path.read_text(encoding="utf-8") for path in tests)
        kinds = (kind for kind in vars(toy_rankers).values() if isinstance(kind, type) and issubclass(kind, Decoder))
        assert [kind.__name__ for kind in kinds if kind.__name__ not in text] == []
