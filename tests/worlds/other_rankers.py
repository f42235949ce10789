"""The three rankers that others wrote, at small sizes: a decoder of `transformers`, SASRec of RecBole, the tutorial's.

They are made and used in processes of their own: `transformers` in the process of a test would break later tests
(`tests/workers/test_causal_lm.py`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from relaygr.cli.app import app
from relaygr.ingest.recbole import item_numbers, items_of_log
from relaygr.schemas.messages import Behaviours
from relaygr.worker.calibration import Calibration, describe, save_calibration
from relaygr.worker.kv import KvDtype
from relaygr.worker.measuring import bind_own_arena
from relaygr.worker.model.config import PrefixRules
from relaygr.worker.model.convert.recbole import read_sasrec, write_sasrec
from relaygr.worker.model.engine import engine_to_check, load_engine
from relaygr.worker.model.inference import FullRequest, full_inference
from relaygr.worker.model.ranker_engine import RankerEngine
from relaygr.worker.model.rankers import write_record
from tests.promised import unavailable
from tests.worlds.relay import COEFFICIENTS

ROOT = Path(__file__).parents[2]
RECBOLE = ROOT / "tests" / "upstream" / "recbole"
EXAMPLE = ROOT / "docs" / "examples" / "ranker"
TRANSFORMERS = Path(sys.prefix) / "transformers"
USERS, SUFFIX, CANDIDATES = 24, 2, 10
PAGE_TOKENS = 256
"""More than a prefix has, so that each takes a page, and few fit into 1 MiB."""


class Other(StrEnum):
    DECODER = "decoder"
    SASREC = "sasrec"
    ONE_TRANS = "one-trans"

    @property
    def module(self) -> str:
        """The module that the operator lists."""
        modules = {Other.DECODER: "relaygr.ranker.causal_lm", Other.SASREC: "relaygr.ranker.sasrec"}
        return modules.get(self, "ours")

    @property
    def history(self) -> int:
        """Behaviours of each user's history."""
        return 14 if self is Other.SASREC else 40

    def environment(self) -> dict[str, str]:
        """What a process needs to find the code. The test is skipped where a library is missing."""
        if self is Other.DECODER and not TRANSFORMERS.is_dir():
            unavailable("transformers", f"{TRANSFORMERS} does not exist: `make test-fast` makes it")
        path = [str(ROOT), *{Other.DECODER: [str(TRANSFORMERS)], Other.ONE_TRANS: [str(EXAMPLE)]}.get(self, [])]
        return {"PYTHONPATH": os.pathsep.join(path)}

    def run(self, folder: Path, commands: Sequence[Sequence[str]] = ()) -> str:
        """What `main` prints, in a process that finds the code."""
        words = [sys.executable, "-m", __name__, self.value, str(folder), json.dumps(commands)]
        environment = {**os.environ, **self.environment(), "COLUMNS": "300"}
        done = subprocess.run(words, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def said(self, model: Path, *commands: Sequence[str]) -> list[tuple[int, str]]:
        """Writes a model that was not checked. Returns exit codes and texts of these commands of `relaygr`."""
        answers: list[tuple[int, str]] = json.loads(self.run(model, commands))
        return answers


@dataclass(frozen=True, slots=True)
class Written:
    """Two models, the users' items, of which the last are the suffix, and the scores [models, users, candidates]."""

    models: tuple[Path, Path]
    items: np.ndarray
    candidates: np.ndarray
    scores: np.ndarray

    @classmethod
    def of(cls, other: Other, folder: Path) -> Written:
        other.run(folder)
        with np.load(folder / "full.npz") as full:
            return cls((folder / "model-1", folder / "model-2"), full["items"], full["candidates"], full["scores"])


def behaviours_of(items: np.ndarray, start: int = 0) -> Behaviours:
    """Of one user, a minute apart."""
    times = 1_700_000_000_000 + np.arange(start, start + items.size, dtype=np.int64) * 60_000
    return Behaviours(items, (np.arange(start, start + items.size) % 3).astype(np.uint16), times)


def write_model(other: Other, folder: Path, seed: int) -> np.ndarray:
    """A folder as its user makes it, not yet checked. Returns the ids of its items."""
    folder.mkdir(parents=True)
    match other:
        case Other.DECODER:
            from tests.workers.causal_lm_cases import ITEMS, write_folder

            write_folder(folder, "qwen3", seed=seed, head_dim=16)
            return np.arange(ITEMS)
        case Other.SASREC:
            found = read_sasrec(RECBOLE / "sasrec.pth")
            ids = item_numbers(items_of_log(RECBOLE / "recbole.inter", found.config))
            write_sasrec(folder, found, ids, 4, 20)
            if seed:
                path, made = folder / "model.safetensors", torch.Generator().manual_seed(seed)
                trained = load_file(path)
                places = trained["position_embedding.weight"]
                trained["position_embedding.weight"] = places + torch.randn(places.shape, generator=made)
                save_file(trained, path)
            return ids
        case Other.ONE_TRANS:
            from ours import Net

            options = {
                "items": 70, "actions": 4, "layers": 2, "heads": 2, "width": 32, "max_history": 60, "max_suffix": 8,
            }  # fmt: skip
            torch.manual_seed(seed)
            net = Net(**options)
            torch.nn.init.normal_(net.item.weight)
            save_file(net.state_dict(), folder / "model.safetensors")
            (folder / "config.json").write_text(json.dumps({"ranker": "ours:OneTrans", "options": options}))
            return np.arange(70)


def write_models(other: Other, folder: Path) -> None:
    """For `Written`: checked, with a calibration, and with the scores of full inference."""
    random, scores = np.random.default_rng(3), []
    for number in (1, 2):
        model = folder / f"model-{number}"
        ids = write_model(other, model, number - 1)
        if number == 1:
            items = ids[random.integers(0, ids.size, (USERS, other.history + SUFFIX))].astype(np.int64)
            candidates = random.permutation(ids)[:CANDIDATES].astype(np.int64)
        checking = engine_to_check(model, "cpu", [other.module])
        assert isinstance(checking, RankerEngine) and checking.record is not None
        write_record(model, replace(checking.record, rules=PrefixRules()))
        engine = load_engine(model, "cpu", KvDtype.FLOAT32, PAGE_TOKENS, 1, ranker_modules=[other.module])
        made = Calibration(describe(engine), datetime.now(UTC).isoformat(), COEFFICIENTS, (), (), (), ())
        save_calibration(made, model / "calibration.json")
        pages = np.arange(bind_own_arena(engine).shape[0], dtype=np.int32)
        none, of_model = np.empty(0, np.int64), []
        for user in items:
            suffix = behaviours_of(user[-SUFFIX:], other.history)
            asked = FullRequest(none, behaviours_of(user[:-SUFFIX]), candidates, 0, suffix)
            of_model.append(full_inference(engine, asked, pages).outputs.scores.ravel())
        scores.append(of_model)
    np.savez(folder / "full.npz", items=items, candidates=candidates, scores=np.array(scores))


def main(name: str, folder: str, commands: str) -> None:
    """With commands, runs them on one model that was not checked."""
    other, asked = Other(name), json.loads(commands)
    if not asked:
        write_models(other, Path(folder))
        return
    write_model(other, Path(folder), 0)
    done = [CliRunner().invoke(app, words) for words in asked]
    sys.stdout.write(json.dumps([(each.exit_code, " ".join(each.output.split())) for each in done]))


if __name__ == "__main__":
    main(*sys.argv[1:])
