"""docs/rankers.md runs from top to bottom in a shell, with few steps of training and a short demo."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch

from relaygr.worker.model.rankers import read_ranker
from relaygr.worker.model_check import Rule
from tests.training.made_logs import cyclic_log, write_inter
from tests.worlds.page_script import type_in

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "docs" / "examples" / "ranker"
PAGE = (ROOT / "docs" / "rankers.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```(\w+) ?(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
CHANGES = {
    # The log is there already.
    "relaygr data movielens data\n": "",
    "data/log.inter model\n": "data/log.inter model --steps 8\n",
    "--ranker-module ours\nrelaygr model show": "--ranker-module ours --minutes 0.05\nrelaygr model show",
    "--qps 20": "--qps 20 --seconds 20 --seeds 1 --jobs 1",
    # A busy machine may miss those gates of the demo that depend on its speed.
    "worker.ranker_modules=[ours]'\n": "worker.ranker_modules=[ours]' --set traffic.users=10 --broker embedded --no-ui"
    " --seconds 4 --rate 8 --deadline-ms 9000 --lead-ms 200 || test $? = 1\n",
}
TIMEOUT_S = 400


def blocks(language: str) -> list[str]:
    return [text for found, _, text in BLOCK.findall(PAGE) if found == language]


def test_the_class_of_the_page_is_that_of_the_example() -> None:
    (shown,) = blocks("python")
    source = (EXAMPLE / "ours.py").read_text(encoding="utf-8")
    assert [part for part in shown.strip().split("\n\n") if part not in source] == []


def test_the_page_has_every_rule_that_is_tried() -> None:
    rows = {line.split("|")[1].strip() for line in PAGE.splitlines() if line.startswith("|")}
    assert {rule.text for rule in Rule} <= rows


@pytest.mark.slow
def test_training_and_serving_are_one_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scores of a batch of users, as in training, are those that the worker computes in chunks."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    from ours import Net, OneTrans
    from safetensors.torch import save_file

    from relaygr.ranker import History, ModelFolder, Past

    options = {
        "items": 30, "actions": 4, "layers": 2, "heads": 2, "width": 8, "max_history": 12, "max_suffix": 4,
    }  # fmt: skip
    torch.manual_seed(2)
    net = Net(**options)
    net.item_ids.copy_(3 * torch.arange(30))
    save_file(net.state_dict(), tmp_path / "model.safetensors")
    ranker = OneTrans(ModelFolder(tmp_path, options, torch.device("cpu"), torch.float32))
    items, actions = 3 * torch.randint(0, 31, (2, 11)), torch.randint(0, 6, (2, 11))
    candidates = torch.randint(0, 90, (2, 5))
    none = torch.empty(0, dtype=torch.int64)
    with torch.inference_mode():
        expected = net(items, actions, 0, candidates, torch.tensor([[11] * 5, [9] * 5]))
        for user, (prefix, seen) in enumerate(((8, 11), (9, 9))):
            history = History(items[user, :prefix], actions[user, :prefix], items[user, :prefix], none)
            kept = [(torch.empty(2, 0, 4), torch.empty(2, 0, 4))] * 2
            for start, end in ((0, 3), (3, 4), (4, prefix)):
                past = Past(start, 2, kept.__getitem__)
                computed = ranker.prefix(history, start, end, past)
                kept = [
                    (torch.cat((k, own_k), 1), torch.cat((v, own_v), 1))
                    for (k, v), (own_k, own_v) in zip(kept, computed.layers, strict=True)
                ]
            recent = History(items[user, prefix:seen], actions[user, prefix:seen], items[user, prefix:seen], none)
            scores = ranker.rank(recent, candidates[user], Past(prefix, 2, kept.__getitem__), None)
            assert torch.allclose(scores[:, 0], expected[user], atol=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S + 60)
def test_the_page_can_be_typed_in(tmp_path: Path) -> None:
    folder = tmp_path / "docs" / "examples" / "ranker"
    (folder / "data").mkdir(parents=True)
    for source in EXAMPLE.glob("*.py"):
        shutil.copy(source, folder)
    write_inter(folder / "data" / "log.inter", cyclic_log())
    script = "".join(blocks("bash"))
    for written, meant in CHANGES.items():
        assert written in script
        script = script.replace(written, meant)
    printed = type_in(script, tmp_path, {"COLUMNS": "200"}, TIMEOUT_S)
    assert re.search(r"the next item is among the first 10 of 100: \d+% of users", printed)
    assert "broken at" not in printed
    assert "model can be served" in printed
    for gate in ("no request lost:", "cached scores equal full scores:"):
        assert re.search(rf"^yes +{gate}", printed, re.MULTILINE), printed
    # It deploys no model without its own calibration.
    assert f"{read_ranker(folder / 'served' / 'current').revision} serves from served/current" in printed
