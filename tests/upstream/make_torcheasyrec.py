"""TorchEasyRec's dlrm_hstu: trains it on two ranks, saves it with its own `save_model`, and records scores.

Run as `python -m tests.upstream.make_torcheasyrec CHECKOUT`, with a checkout of TorchEasyRec.

The checkout's *.proto files are compiled before. The model is that of torcheasyrec.config.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.upstream.shared import HERE, make_folder, page_names, shard, stand_in

CONFIG = HERE / "torcheasyrec.config"
USERS, CANDIDATES, LONGEST = 4, 12, 40
ROWS = {"user_id": 30, "region": 10, "video_id": 120, "video_cat": 12}
TASKS = ("is_click", "is_like")
STEPS = 10


class Loader:
    """Makes batches, and the same requests as docs/checkpoints.md lists them."""

    def __init__(self) -> None:
        self._random = torch.Generator().manual_seed(1)
        self.categories = self._draw(ROWS["video_id"], ROWS["video_cat"])

    def _draw(self, count: int, end: int, start: int = 0) -> torch.Tensor:
        return torch.randint(start, end, (count,), generator=self._random)

    def requests(self) -> list[dict[str, Any]]:
        found = []
        for history in self._draw(USERS, LONGEST + 1, 1).tolist():
            now = 1_700_000_000 + int(self._draw(1, 100_000))
            found.append(
                {
                    "items": self._draw(history, ROWS["video_id"]),
                    "actions": self._draw(history, 8),
                    "times_s": now - 5 - self._draw(history, 15_000).sort(descending=True)[0],
                    "query_s": now,
                    "features": {name: int(self._draw(1, ROWS[name])) for name in ("user_id", "region")},
                    "candidates": self._draw(CANDIDATES, ROWS["video_id"]),
                    "labels": self._draw(CANDIDATES, 4),
                }
            )
        return found

    def batch(self, requests: list[dict[str, Any]]) -> Any:
        from torchrec import JaggedTensor, KeyedJaggedTensor
        from tzrec.datasets.utils import BASE_DATA_GROUP, Batch

        def joined(name: str) -> torch.Tensor:
            return torch.cat([request[name] for request in requests])

        ones = torch.ones(USERS, dtype=torch.int64)
        histories = torch.tensor([len(request["items"]) for request in requests])
        counts = CANDIDATES * ones
        items, candidates = joined("items"), joined("candidates")
        columns = {
            "user_id": (torch.tensor([request["features"]["user_id"] for request in requests]), ones),
            "region": (torch.tensor([request["features"]["region"] for request in requests]), ones),
            "uih_seq__video_id": (items, histories),
            "cand_seq__item_video_id": (candidates, counts),
            "uih_seq__video_cat": (self.categories[items], histories),
            "cand_seq__item_video_cat": (self.categories[candidates], counts),
        }
        values, lengths = zip(*columns.values(), strict=True)
        query_times = torch.tensor([request["query_s"] for request in requests]).repeat_interleave(CANDIDATES)
        return Batch(
            sparse_features={
                BASE_DATA_GROUP: KeyedJaggedTensor.from_lengths_sync(
                    list(columns), torch.cat(values), torch.cat(lengths)
                )
            },
            sequence_dense_features={
                "uih_seq__action_timestamp": JaggedTensor(joined("times_s")[:, None], lengths=histories),
                "uih_seq__action_weight": JaggedTensor(joined("actions")[:, None], lengths=histories),
                "cand_seq__item_query_time": JaggedTensor(query_times[:, None], lengths=counts),
            },
            labels={},
            jagged_labels={"item_action_weight": JaggedTensor(joined("labels"), lengths=counts)},
        )


def make_model() -> tuple[Any, Any]:
    from google.protobuf import text_format
    from tzrec.features.feature import create_features
    from tzrec.models.dlrm_hstu import DlrmHSTU
    from tzrec.models.model import TrainWrapper
    from tzrec.ops import Kernel
    from tzrec.protos.pipeline_pb2 import EasyRecConfig

    pipeline = text_format.Parse(CONFIG.read_text(), EasyRecConfig())
    model = DlrmHSTU(
        model_config=pipeline.model_config,
        features=create_features(list(pipeline.feature_configs)),
        labels=["item_action_weight"],
    )
    model.set_kernel(Kernel.PYTORCH)
    trained = shard(TrainWrapper(model, device=torch.device("cpu")), ["video_id_emb", "video_cat_emb"])
    random = torch.Generator().manual_seed(2)
    with torch.no_grad():  # Norms and biases are ones and zeros: an error in them would not show.
        for name, parameter in sorted(trained.named_parameters()):
            if parameter.dim() == 1 and "embedding_group" not in name:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=random))
    return trained, pipeline


def make(rank: int) -> None:
    stand_in("pyfg", "graphlearn", "faiss", "common_io", "odps", "alibabacloud_credentials")
    stand_in("alibabacloud_tea_openapi", "feature_store_py", "feature_store_sdk", "confluent_kafka")
    import fbgemm_gpu  # noqa: F401 - the model calls its operators.
    from tzrec.utils import checkpoint_util, config_util

    model, pipeline = make_model()
    loader = Loader()
    dense = [parameter for name, parameter in model.named_parameters() if "embedding_group" not in name]
    optimizer = torch.optim.Adam(dense, lr=1e-2)
    model.train()
    for _ in range(STEPS):
        loss = model(loader.batch(loader.requests()))[0]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    checkpoint_util.save_model(f"model.ckpt-{STEPS}", model, None)
    if rank == 0:
        config_util.save_message(pipeline, "./pipeline.config")
        np.save("categories.npy", loader.categories.numpy())
    model.eval()
    line = page_names()["line"]
    # All ranks look up rows together.
    with Path("requests.jsonl" if rank == 0 else os.devnull).open("w") as file, torch.no_grad():
        for number in range(6):
            requests = loader.requests()
            found = model.module.model.predict(loader.batch(requests))
            scores = {task: found[f"probs_{task}"].view(USERS, CANDIDATES) for task in TASKS}
            for user, request in enumerate(requests):
                line(
                    file,
                    number,
                    request["items"].tolist(),
                    request["actions"].tolist(),
                    request["times_s"].tolist(),
                    request["query_s"],
                    request["features"],
                    request["candidates"].tolist(),
                    {task: own[user].tolist() for task, own in scores.items()},
                )


if __name__ == "__main__":
    make_folder("torcheasyrec", make, ranks=2)
