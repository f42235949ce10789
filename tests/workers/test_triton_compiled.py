"""The kernels compile for GPUs on any machine: Triton brings its compiler, which needs no GPU."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOLERATED_SPILL_BYTES = 150
"""Of a thread, in blocks that the tuner may choose: it decides whether that costs more than it wins."""
OLDEST, OLDEST_SPILL_BYTES = "3.4.", 480
"""The oldest Triton that is allowed, and what its best blocks may spill on sm_80, with K,V in int8."""
DIMENSIONS = (64, 128, 256)
FLOAT8 = "bfloat16 on float8 pages"
NARROW = (
    "bfloat16",
    "float16 on bfloat16 pages",
    FLOAT8,
    "bfloat16 on int8 pages",
    "bfloat16 on int8 pages, every bias",
    "bfloat16, every mask",
    "bfloat16, every bias",
    "bfloat16, every mask and bias",
)
"""Kinds whose products are for tensor cores."""
WIDE = ("float32", "float32, every bias")
ALL = [
    (gpu, dimension, kind)
    for gpu, dimension, kind in itertools.product(("sm_90", "sm_80", "sm_100"), DIMENSIONS, NARROW + WIDE)
    if (gpu, kind) != ("sm_80", FLOAT8)  # Triton has no float8 for it, as `check_stored_type` says.
]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is there for Linux only"),
]


def compiled(*arguments: str) -> dict[str, Any]:
    """The report of `compiled_kernels.py`, in a process without the interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.workers.compiled_kernels", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def test_each_kernel_compiles_for_hopper_fits_it_and_uses_its_tensor_cores() -> None:
    for kernel, found in compiled("sm_90").items():
        assert found["fits"] and found["spilled_bytes"] == 0 and not found["notes"], (kernel, found)
        is_attention = not kernel.startswith(("input norm", "output", "store", "round", "join"))
        uses_tensor_cores = is_attention and "float16" in kernel
        assert (found["tensor_products"] > 0, found["own_products"] > 0) == (uses_tensor_cores,) * 2, kernel
        assert (found["async_copies"] > 0) == is_attention, kernel


def test_ampere_has_no_float8_as_the_launch_says() -> None:
    with pytest.raises(AssertionError, match="fp8e4nv not supported in this architecture"):
        compiled("sm_80", f"{FLOAT8}, dimension 64")


@pytest.mark.parametrize(("gpu", "dimension", "kind"), ALL if "RELAYGR_TEST_ALL_KERNELS" in os.environ else [])
def test_whatever_the_tuner_chooses_is_good_code(gpu: str, dimension: int, kind: str) -> None:
    report = compiled(gpu, f"{kind}, dimension {dimension}")
    fitting = {blocks: found for blocks, found in report.items() if found["fits"]}
    not_serialised = [found["spilled_bytes"] for found in fitting.values() if not found["notes"]]
    if version("triton").startswith(OLDEST):
        # It spills and serialises more: the tuner must have something better to choose.
        assert not_serialised, report
        spills_most = gpu == "sm_80" and "int8" in kind
        assert min(not_serialised) <= (OLDEST_SPILL_BYTES if spills_most else TOLERATED_SPILL_BYTES), report
    else:
        assert not_serialised and len(not_serialised) == len(fitting), report
        assert max(not_serialised) <= TOLERATED_SPILL_BYTES, report
        assert min(not_serialised) == 0 or dimension > 128, report
    for blocks, found in fitting.items():
        assert (found["tensor_products"] > 0) == (kind in NARROW), (blocks, found)
        # A bias leaves registers for 32 rows of dimension 256, and a `wgmma` needs 64.
        if kind in NARROW and (dimension <= 128 or "bias" not in kind):
            assert found["own_products"] > 0, (blocks, found)
        assert found["async_copies"] > 0, (blocks, found)
