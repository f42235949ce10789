"""NVIDIA's ranking model with native layers: saves it as its `commons.checkpoint` does, and records scores.

Run as `python -m tests.upstream.make_nvidia CHECKOUT`, with a checkout of recsys-examples.

The code needs a GPU. Its Triton kernels run under Triton's interpreter here, and its attention in PyTorch. Its library
of CUDA operators is missing: a stand-in joins rows in the order of the original. Transformer Engine's linear layers are
Megatron's own, which have the same parameters. torchrec's collection, which NVIDIA's class wraps, holds the tables.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tests.upstream.shared import make_folder, page_names, stand_in, stand_in_module

WIDTH, CANDIDATES, LONGEST = 16, 12, 30
ROWS = {"region": 10, "device": 8, "video_id": 120, "action_type": 6}
CONTEXTUAL = ["region", "device"]
SCALING = 96
"""N of all batches; by default it depends on the batch."""


def join_rows(
    values: Sequence[torch.Tensor], offsets: Sequence[torch.Tensor], longest: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """In place of `jagged_2D_tensor_concat`: the rows of each user one after the other."""
    users = [
        [part[start:end] for part, (start, end) in zip(values, ends, strict=True)]
        for ends in zip(*(zip(each[:-1].tolist(), each[1:].tolist(), strict=True) for each in offsets), strict=True)
    ]
    lengths = [sum(map(len, parts)) for parts in users]
    return torch.cat([part for parts in users for part in parts]), torch.tensor(lengths)


def without_a_gpu() -> None:
    """Makes NVIDIA's modules importable and able to run here."""
    os.environ["TRITON_INTERPRET"] = "1"
    examples = Path(sys.path[0]) / "examples"
    sys.path[:0] = [str(examples / "hstu"), str(examples)]
    torch.cuda.current_device = lambda: torch.device("cpu")
    stand_in("hstu_cuda_ops", "dynamicemb", "hstu", "flash_attn", "paged_kvcache_ops", "hstu_attn")
    stand_in_module("commons.ops.cuda_ops.JaggedTensorOpFunction", jagged_2D_tensor_concat=join_rows)
    stand_in_module("commons.ops.cuda_ops.fake_hstu_cuda_ops")
    stand_in_module("modules.fused_hstu_layer", FusedHSTULayer=None)
    # Marks for a profiler.
    stand_in_module(
        "commons.utils.nvtx_op",
        output_nvtx_hook=lambda **_: lambda function: function,
        register_setter_and_getter_for_nvtx=lambda *_, **__: None,
    )
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from triton.runtime.autotuner import Autotuner

    # The first configuration of a kernel will do.
    Autotuner._bench = lambda *_, **__: [0.0]
    stand_in_module(
        "megatron.core.extensions.transformer_engine",
        TEColumnParallelLinear=ColumnParallelLinear,
        TERowParallelLinear=RowParallelLinear,
    )
    parallel_state.initialize_model_parallel(1)


def make_model() -> Any:
    from configs import hstu_config as configs
    from modules.hstu_block import HSTUBlock
    from modules.mlp import MLP
    from torchrec import EmbeddingCollection, EmbeddingConfig

    config = configs.get_hstu_config(
        hidden_size=WIDTH,
        kv_channels=8,
        num_attention_heads=2,
        num_layers=2,
        dtype=torch.float32,
        position_encoding_config=configs.PositionEncodingConfig(
            num_position_buckets=64, num_time_buckets=10, use_time_encoding=False
        ),
        kernel_backend=configs.KernelBackend.PYTORCH,
        hstu_layer_type=configs.HSTULayerType.NATIVE,
        fuse_norm_mul_dropout=False,
        scaling_seqlen=SCALING,
    )
    config.use_cpu_initialization = True
    config.perform_initialization = True

    class Tables(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            tables = [EmbeddingConfig(n, WIDTH, name=name, feature_names=[name]) for name, n in ROWS.items()]
            self._data_parallel_embedding_collection = EmbeddingCollection(tables=tables)

        def forward(self, features: Any) -> Any:
            return self._data_parallel_embedding_collection(features)

    class Ranking(torch.nn.Module):
        """`RankingGR` without its losses and metrics."""

        def __init__(self) -> None:
            super().__init__()
            self._embedding_collection = Tables()
            self._hstu_block = HSTUBlock(config)
            self._mlp = MLP(WIDTH, [12, 2], "relu", bias=True)

        def get_logit_and_labels(self, batch: Any) -> tuple[torch.Tensor, Any, None]:
            rows, lengths = self._hstu_block(embeddings=self._embedding_collection(batch.features), batch=batch)
            return self._mlp(rows.values), lengths, None

    return Ranking().eval()


def make_batch(random: torch.Generator, histories: Sequence[int]) -> Any:
    from commons.datasets.hstu_batch import HSTUBatch
    from torchrec import KeyedJaggedTensor

    users = len(histories)
    ones, lengths = torch.ones(users, dtype=torch.int64), torch.tensor(histories) + CANDIDATES
    of_each = {name: ones if name in CONTEXTUAL else lengths for name in ROWS}
    values = [torch.randint(ROWS[name], (int(own.sum()),), generator=random) for name, own in of_each.items()]
    features = KeyedJaggedTensor.from_lengths_sync(list(ROWS), torch.cat(values), torch.cat(list(of_each.values())))
    return HSTUBatch(
        features=features,
        batch_size=users,
        feature_to_max_seqlen={name: int(own.max()) for name, own in of_each.items()},
        contextual_feature_names=CONTEXTUAL,
        item_feature_name="video_id",
        action_feature_name="action_type",
        max_num_candidates=CANDIDATES,
        num_candidates=torch.full((users,), CANDIDATES),
    )


def make(rank: int) -> None:
    without_a_gpu()
    from commons.checkpoint import checkpoint

    model = make_model()
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():  # Untrained norms and biases are ones and zeros: an error in them would not show.
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=random))
            elif "embedding" not in name:
                parameter.copy_(torch.randn(parameter.shape, generator=random) * 2 / parameter.shape[1] ** 0.5)
    checkpoint.save(".", model)
    histories = torch.randint(1, LONGEST + 1, (6, 4), generator=random).tolist()
    loader = [make_batch(random, each) for each in histories]
    page_names()["record_nvidia"](model, loader, "requests.jsonl", CONTEXTUAL, ["click", "like"])


if __name__ == "__main__":
    make_folder("nvidia", make, ranks=1)
