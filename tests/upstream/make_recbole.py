"""SASRec of RecBole: trains a small one on a made-up log, and records its scores and how it numbers items.

Run as `python -m tests.upstream.make_recbole`, in an environment of its own (README.md).
"""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.upstream.shared import HERE, stand_in, stand_in_module

NAME = "recbole"
"""Of the folder, and of RecBole's data set in it."""
LONGEST = 20
COMMON = {
    "data_path": ".",
    "checkpoint_dir": "saved",
    "load_col": {"inter": ["user_id", "item_id", "rating", "timestamp"]},
    "MAX_ITEM_LIST_LENGTH": LONGEST,
    "hidden_size": 16,
    "inner_size": 24,
    "n_layers": 2,
    "n_heads": 2,
    "layer_norm_eps": 1e-6,
    # As large as in a model that was trained for longer: an error in a norm or a place shows.
    "initializer_range": 0.3,
    "train_neg_sample_args": None,
    "epochs": 8,
    "train_batch_size": 64,
    "learning_rate": 0.01,
    "use_gpu": False,
    "show_progress": False,
}
TRAINED: dict[str, Any] = {"user_inter_num_interval": "[4,inf)", "item_inter_num_interval": "[3,inf)"}
NUMBERED: list[dict[str, Any]] = [
    {},
    TRAINED,
    {"val_interval": {"rating": "[3,inf)"}},
    {"val_interval": {"rating": "(1,2];[4.5,5]"}, "item_inter_num_interval": "(4,30)"},
    {"user_inter_num_interval": None, "item_inter_num_interval": "[8,inf)"},
]
"""Settings of RecBole that change which items it numbers."""


class Writer:
    """TensorBoard's, to whom nothing is told."""

    def __init__(self, *_: object) -> None:
        pass

    def add_scalar(self, *_: object) -> None:
        pass

    def add_hparams(self, *_: object) -> None:
        pass


def write_log(path: Path) -> None:
    """The lines of all users in a random order. Users like items that follow those that they had."""
    draw = random.Random(3)
    names = [str(100 + 7 * at) if at % 3 else f'item "{at}"' for at in range(60)]
    lines = []
    for user in range(48):
        item = draw.randrange(60)
        for at in range(draw.choice((2, 4, 9, 16, 22, 40))):
            item = draw.randrange(60) if draw.random() < 0.3 else (item + draw.randrange(1, 4)) % 60
            rating = draw.choice(("1", "2", "3", "4", "4.5", "5", ""))
            lines.append([f"u{user}", names[item], rating, str(1_600_000_000 + 977 * at + user)])
    lines += [
        ["u1", "NA", "3", "1700000000"],
        ["", names[1], "3", "1700000001"],
        ["u2", "rare", "5", "1700000002"],
        ["u3"],
    ]
    draw.shuffle(lines)
    text = "\n".join(
        "\t".join(f'"{each.replace(chr(34), chr(34) * 2)}"' if '"' in each else each for each in line) for line in lines
    )
    path.write_text(f"user_id:token\titem_id:token\trating:float\ttimestamp:float\n{text}\n")


def main() -> None:
    stand_in("ray", "thop", "hyperopt", "plotly")
    stand_in_module("torch.utils.tensorboard", SummaryWriter=Writer)
    from recbole.config import Config
    from recbole.data import create_dataset, data_preparation
    from recbole.model.sequential_recommender import SASRec
    from recbole.trainer import Trainer
    from recbole.utils import init_seed

    os.chdir(HERE)
    torch.set_num_threads(1)
    shutil.rmtree(NAME, ignore_errors=True)
    Path(NAME).mkdir()
    write_log(Path(NAME, f"{NAME}.inter"))

    numbered = []
    for changes in NUMBERED:
        dataset = create_dataset(Config("SASRec", NAME, config_dict=COMMON | changes))
        numbered.append({"config": changes, "items": dataset.field2id_token["item_id"].tolist()})

    config = Config("SASRec", NAME, config_dict=COMMON | TRAINED)
    init_seed(config["seed"], True)
    dataset = create_dataset(config)
    items = dataset.field2id_token["item_id"]
    histories: dict[int, list[int]] = {}
    rows = dataset.inter_feat.sort_values(["user_id", "timestamp"])
    for user, item in zip(rows["user_id"], rows["item_id"], strict=True):
        histories.setdefault(user, []).append(item)
    train, valid, test = data_preparation(config, dataset)
    model = SASRec(config, train.dataset)
    trainer = Trainer(config, model)
    trainer.saved_model_file = f"{NAME}/sasrec.pth"
    trainer.fit(train, valid, verbose=False, show_progress=False)
    model.load_state_dict(torch.load(trainer.saved_model_file, weights_only=False)["state_dict"])
    model.eval()

    cases = []
    with torch.no_grad():
        for batch in test:
            interaction = batch[0]
            scores = model.full_sort_predict(interaction).numpy().astype(np.float64).round(9)
            for at, user in enumerate(interaction["user_id"].tolist()):
                history, length = histories[user][:-1], int(interaction["item_length"][at])
                assert interaction["item_id_list"][at, :length].tolist() == history[-LONGEST:]
                cases.append({"history": items[history].tolist(), "scores": scores[at].tolist()})
    record = {"numbered": numbered, "cases": cases}
    Path(NAME, "recorded.json").write_text(json.dumps(record) + "\n")
    for left in ("saved", "log", "log_tensorboard"):
        shutil.rmtree(left, ignore_errors=True)


if __name__ == "__main__":
    main()
