"""Meta's DlrmHSTU: trains it on two ranks, saves it with its own `save_dmp_checkpoint`, and records scores.

Run as `python -m tests.upstream.make_meta CHECKOUT`, with a checkout of generative-recommenders.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch

from tests.upstream.shared import make_folder, page_names, shard

WIDTH = 16
ROWS = {"movie_id": 120, "user_id": 30, "region": 10}
CANDIDATES, LONGEST = 12, 26
"""With two contextual features, N is 40 in a batch that has the longest history and the most candidates."""
STEPS = 150


def configs() -> tuple[Any, dict[str, Any]]:
    """Those of MovieLens with the features and tasks of docs/checkpoints.md, and small."""
    from generative_recommenders.dlrm_v3.configs import get_embedding_table_config, get_hstu_configs
    from generative_recommenders.modules.multitask_module import MultitaskTaskType, TaskConfig

    config, tables = get_hstu_configs("movielens-1m"), get_embedding_table_config("movielens-1m")
    config.hstu_num_heads = config.hstu_attn_num_layers = 2
    config.hstu_embedding_table_dim = config.hstu_transducer_embedding_dim = WIDTH
    config.hstu_attn_linear_dim = config.hstu_attn_qk_dim = 8
    config.hstu_preprocessor_hidden_dim = 24
    config.max_seq_len = 64
    config.contextual_feature_to_max_length = {"user_id": 1, "region": 1}
    config.contextual_feature_to_min_uih_length = {"user_id": 4}
    config.user_embedding_feature_names = ["movie_id", "user_id", "region"]
    sequences = [name for name, _ in config.merge_uih_candidate_feature_mapping]
    config.hstu_uih_feature_names = ["user_id", "region", *sequences]
    config.multitask_configs = [
        TaskConfig("click", 1, MultitaskTaskType.BINARY_CLASSIFICATION),
        TaskConfig("watch", 1, MultitaskTaskType.REGRESSION),
    ]
    tables["region"] = tables["zip_code"]
    tables["region"].name, tables["region"].feature_names = "region", ["region"]
    kept = {name: tables[name] for name in ROWS}
    for name, rows in ROWS.items():
        kept[name].num_embeddings, kept[name].embedding_dim = rows, WIDTH
    return config, kept


def make_model() -> tuple[Any, Any]:
    """The class fixes 8,192 positions and 2,048 ages: fewer keep the files small.

    Meta's code for the CPU limits ages by the columns of their table, the others by its rows: here both are the same.
    """
    from generative_recommenders.common import HammerKernel
    from generative_recommenders.modules import dlrm_hstu
    from torch.distributed.optim import _apply_optimizer_in_backward
    from torchrec.optim import RowWiseAdagrad

    encoder = dlrm_hstu.HSTUPositionalEncoder
    dlrm_hstu.HSTUPositionalEncoder = lambda **sizes: encoder(
        **{**sizes, "num_position_buckets": 64, "num_time_buckets": WIDTH - 1}
    )
    config, tables = configs()
    model = dlrm_hstu.DlrmHSTU(config, tables, is_inference=False, bf16_training=False)
    model.set_hammer_kernel(HammerKernel.PYTORCH)
    for parameter in model._embedding_collection.parameters():
        _apply_optimizer_in_backward(RowWiseAdagrad, [parameter], {"lr": 0.1})
    return shard(model, list(tables)), config


def make_batch(config: Any, random: torch.Generator, histories: Sequence[int], candidates: Sequence[int]) -> Any:
    from generative_recommenders.dlrm_v3.datasets.dataset import collate_fn
    from torchrec import KeyedJaggedTensor

    def draw(count: int, end: int) -> torch.Tensor:
        return torch.randint(end, (count,), generator=random)

    def keyed(names: Sequence[str], columns: dict[str, torch.Tensor]) -> KeyedJaggedTensor:
        lengths = torch.tensor([len(columns[name]) for name in names])
        return KeyedJaggedTensor(list(names), torch.cat([columns[name] for name in names]), lengths=lengths)

    samples = []
    for history, asked in zip(histories, candidates, strict=True):
        now = 1_700_000_000 + int(draw(1, 100_000))
        user = {
            "user_id": draw(1, ROWS["user_id"]),
            "region": draw(1, ROWS["region"]),
            "movie_id": draw(history, ROWS["movie_id"]),
            "movie_rating": 1 + draw(history, 5),
            "action_timestamp": now - 10 - draw(history, 20_000).sort(descending=True)[0],
            "item_weights": draw(history, 32),
            "dummy_watch_time": draw(history, 5),
        }
        items = {
            "item_movie_id": draw(asked, ROWS["movie_id"]),
            "item_movie_rating": 1 + draw(asked, 5),
            "item_query_time": torch.full((asked,), now),
            "item_action_weights": draw(asked, 32),
            "item_dummy_watchtime": draw(asked, 5),
        }
        samples.append((keyed(config.hstu_uih_feature_names, user), keyed(config.hstu_candidate_feature_names, items)))
    return collate_fn(samples)


def make(rank: int) -> None:
    from generative_recommenders.dlrm_v3.checkpoint import save_dmp_checkpoint
    from generative_recommenders.dlrm_v3.utils import MetricsLogger

    model, config = make_model()
    random = torch.Generator().manual_seed(1)

    def lengths() -> tuple[int, int]:
        history, candidates = torch.randint(1, 12, (2,), generator=random).tolist()
        return 2 * history, candidates

    def batch(*requests: tuple[int, int]) -> Any:
        return make_batch(config, random, *zip(*requests, strict=True))

    full = (LONGEST, CANDIDATES)
    padded = [batch(full, (1, 2), (2, 1)), *(batch(full, lengths(), lengths()) for _ in range(7))]
    varying = [batch(lengths(), lengths()) for _ in range(6)]
    # No optimizer state is saved.
    optimizer = torch.optim.SGD([p for name, p in model.named_parameters() if "_embedding_coll" not in name], lr=0.01)
    model.train()
    for step in range(STEPS):
        sample = padded[step % len(padded)]
        loss = sum(model(sample.uih_features_kjt, sample.candidates_features_kjt)[2].values())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    metrics = MetricsLogger(config.multitask_configs, 3, 100, torch.device("cpu"), rank)
    save_dmp_checkpoint(model, optimizer, metrics, rank, STEPS, ".")
    tasks = [task.task_name for task in config.multitask_configs]
    # All ranks look up rows together.
    for name, loader in (("requests", padded), ("varying", varying)):
        file = f"{name}.jsonl" if rank == 0 else os.devnull
        page_names()["record_meta"](model, loader, file, list(config.contextual_feature_to_max_length), tasks)


if __name__ == "__main__":
    make_folder("meta", make, ranks=2)
