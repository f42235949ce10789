"""Runs engines on the fake NPU and prints, as JSON, their differences from the CPU. Runs in a process of its own."""

from __future__ import annotations

import json
import sys
import types
from itertools import pairwise

from tests.workers import fake_npu, fake_rec_sdk

# `open_device("npu")` imports this module; the real one registers the device when it is imported.
sys.modules["torch_npu"] = types.ModuleType("torch_npu")
fake_npu.install()

import numpy as np  # noqa: E402 - the device is installed above
import torch  # noqa: E402

from relaygr.worker.device import CpuDevice, Device, open_device  # noqa: E402
from relaygr.worker.kv import KvDtype  # noqa: E402
from relaygr.worker.model.checkpoint import random_checkpoint  # noqa: E402
from relaygr.worker.model.config import ModelConfig  # noqa: E402
from relaygr.worker.model.engine import build_engine  # noqa: E402
from relaygr.worker.model.interface import PrefixChunk  # noqa: E402
from relaygr.worker.model.options import ComputeDtype  # noqa: E402
from tests.workers.engine_kinds import KINDS  # noqa: E402
from tests.worlds.model import ARENA_PAGES, random_behaviours, small_config  # noqa: E402

OPERATOR_SIZES = small_config(attention_dim=16, hidden_dim=32)


def scores(config: ModelConfig, device: Device, kv: KvDtype, compute: ComputeDtype) -> tuple[str, np.ndarray]:
    """The back end, and the scores of a request whose prefix was computed in chunks."""
    engine = build_engine(random_checkpoint(config, 0), device, kv, 8, compute)
    engine.bind(device.empty_bytes(ARENA_PAGES, engine.geometry.page_bytes).zero_())
    random = np.random.default_rng(0)
    history = random_behaviours(random, 30)
    prefix = history[:25] if engine.rules.grows else history
    features = random.integers(0, 3, config.contextual_tokens)
    inputs = engine.prefix_inputs(features, prefix, 1_700_000_000_000)
    pages = random.permutation(ARENA_PAGES)[:10].astype(np.int32)
    cuts = [0, 11, inputs.tokens] if engine.rules.chunks else [0, inputs.tokens]
    for start, end in pairwise(cuts):
        engine.pre_infer(PrefixChunk(inputs, start, end, pages))
    request = engine.rank_inputs(
        inputs.tokens, pages, history[len(prefix) :], np.arange(6), 1_700_000_000_000, prefix.timestamps_ms
    )
    return engine.backend, engine.rank([request])[0].scores


def difference(config: ModelConfig, kv: KvDtype, compute: ComputeDtype) -> tuple[str, float]:
    backend, ours = scores(config, open_device("npu"), kv, compute)
    _, expected = scores(config, CpuDevice(), kv, compute)
    return backend, float(np.abs(ours - expected).max() / np.abs(expected).max())


def main() -> None:
    torch.set_num_threads(1)
    single = (KvDtype.FLOAT32, ComputeDtype.FLOAT32)
    report = {kind: difference(config, *single) for kind, config in KINDS.items()}
    report["bfloat16"] = difference(small_config(), KvDtype.BFLOAT16, ComputeDtype.BFLOAT16)
    plain = set(fake_npu.operators)
    fake_rec_sdk.register_operator()
    report["RecSDK"] = difference(OPERATOR_SIZES, *single)
    operators = {"plain": sorted(plain), "RecSDK": sorted(fake_npu.operators - plain)}
    json.dump({"report": report, "operators": operators}, sys.stdout)


main()
