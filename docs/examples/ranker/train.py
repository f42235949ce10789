"""Trains the ranker in ours.py on a log of interactions: `python train.py LOG FOLDER` takes a minute of one core.

Each step draws users, a part of each one's history, and places in it. At each place the next item competes with items
that others chose. The last behaviour of each user is left out: the script ends with how often it is among the first
ten of a hundred candidates.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from ours import Net
from safetensors.torch import save_file
from torch.nn import functional

from relaygr.ingest.reading import read_interactions
from relaygr.schemas.messages import Behaviours

USERS, LONGEST, PLACES, CANDIDATES = 16, 64, 8, 8
TESTED, AMONG, FIRST = 300, 100, 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("log", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=500)
    asked = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    random = np.random.default_rng(0)

    read = read_interactions(asked.log)
    histories = [each for index in range(len(read.users)) if len(each := read.of(index)) > 2]
    chosen = np.concatenate([each.items[:-1] for each in histories])
    options = {
        "items": len(np.unique(read.behaviours.items)), "actions": 1 + int(read.behaviours.actions.max()),
        "layers": 2, "heads": 4, "width": 64, "max_history": 1024, "max_suffix": 128,
    }  # fmt: skip
    net = Net(**options)
    net.item_ids.copy_(torch.from_numpy(np.unique(read.behaviours.items)))
    optimiser = torch.optim.AdamW(net.parameters(), lr=2e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 2e-3, total_steps=asked.steps)

    for step in range(asked.steps):
        # All parts of one step begin at the same place of their histories.
        start = int(random.integers(max(1, len(histories[random.integers(len(histories))]) - LONGEST)))
        long = [each for each in histories if len(each) > start + 2]
        items, actions = np.zeros((2, USERS, LONGEST), np.int64)
        seen, asked_items = np.zeros((USERS, PLACES), np.int64), np.zeros((USERS, PLACES, CANDIDATES), np.int64)
        for row, user in enumerate(random.integers(0, len(long), USERS)):
            own = long[user][start : min(start + LONGEST, len(long[user]) - 1)]
            items[row, : len(own)], actions[row, : len(own)] = own.items, own.actions
            seen[row] = random.integers(1, len(own), PLACES)
            asked_items[row] = chosen[random.integers(0, len(chosen), (PLACES, CANDIDATES))]
            asked_items[row, :, 0] = own.items[seen[row]]
        tensors = [torch.from_numpy(each) for each in (items, actions, asked_items, seen.repeat(CANDIDATES, 1))]
        scores = net(tensors[0], tensors[1], start, tensors[2].flatten(1), tensors[3]).view(-1, CANDIDATES)
        loss = functional.cross_entropy(scores, torch.zeros(len(scores), dtype=torch.int64))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
        if step % 50 == 0:
            print(f"step {step:4}  loss {loss.item():.3f}")

    found = share_found(net, histories[:TESTED], chosen, random)
    print(f"the next item is among the first {FIRST} of {AMONG}: {found:.0%} of users (by chance {FIRST / AMONG:.0%})")
    asked.folder.mkdir(parents=True, exist_ok=True)
    save_file(net.state_dict(), asked.folder / "model.safetensors")
    config = {"ranker": "ours:OneTrans", "options": options}
    (asked.folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


@torch.inference_mode()
def share_found(net: Net, histories: list[Behaviours], chosen: np.ndarray, random: np.random.Generator) -> float:
    """The share of users whose last item is among the first, on the behaviours before it."""
    found = 0
    for each in histories:
        own = each[-net.max_history - 1 : -1]
        items, actions = (torch.from_numpy(column.astype(np.int64))[None] for column in (own.items, own.actions))
        candidates = torch.from_numpy(np.append(each.items[-1:], chosen[random.integers(0, len(chosen), AMONG - 1)]))
        scores = net(items, actions, 0, candidates[None], torch.full((1, AMONG), len(own)))[0]
        found += int((scores > scores[0]).sum()) < FIRST
    return found / len(histories)


if __name__ == "__main__":
    main()
