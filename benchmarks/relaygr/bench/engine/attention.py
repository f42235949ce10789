"""`python -m benchmarks.engine.attention`: compares attention back ends, ours and those of others, on one device.

There are two kinds of cases for batches of users: a whole prefix computed at once, and candidates ranked on cached
prefixes. Every back end runs every case in turn. The table has medians, shares of a large matrix product's rate and of
the roofline, and the largest difference from the plain torch back end as a share of the largest value. The roofline is
the time of the arithmetic at that rate, or of the bytes at the rate of a large copy, whichever is longer: for a few
candidates it is the bytes.

`--beside` computes a chunk of another user's prefix in the same forward as the candidates.

Meta's kernels (github.com/meta-recsys/generative-recommenders) run beside ours if their package can be imported. They
take contiguous K,V; the measured time excludes the gather that a paged cache would need. Their normaliser is their N,
so ours is the same. They write A in the type of V; ours write float32.
"""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from json import dumps as dump_json
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table

from relaygr.worker.device import Device, open_device, set_threads
from relaygr.worker.kv import KvDtype, KvGeometry
from relaygr.worker.measuring import matrix_peak_gflops
from relaygr.worker.model.attention.blocked import BlockedAttention
from relaygr.worker.model.attention.choose import choose_attention
from relaygr.worker.model.attention.interface import AttentionBackend
from relaygr.worker.model.attention.paged_kv import PagedKv
from relaygr.worker.model.attention.segments import Segment
from relaygr.worker.model.attention.spec import AttentionSpec

PAGE_TOKENS = 64
BASE = "plain torch"
_COPY_BYTES = 512 << 20
_TYPES = {"float32": (torch.float32, KvDtype.FLOAT32), "bfloat16": (torch.bfloat16, KvDtype.BFLOAT16)}
META = "generative_recommenders.ops.triton.triton_hstu_attention"
"""Not `ops.hstu_attention`, which chooses among kernels that are not all public."""


@dataclass(frozen=True, slots=True)
class Jagged:
    """Users with sequences of one length: q of the last `rows` tokens, k and v of all `length` tokens of each user.

    q [users * rows, heads, dqk], k [users * length, heads, dqk], v [users * length, heads, dv], contiguous. The last
    `targets` tokens of each user are candidates.
    """

    users: int
    length: int
    rows: int
    targets: int
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    alpha: float
    normalizer: int
    """At least `length`."""


Work = Callable[[], torch.Tensor]
"""A function that returns A [users * rows, heads, dv]."""


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """`users` prefixes of `prefix` tokens, with candidates for each; 0 candidates: the prefixes are computed."""

    users: int
    prefix: int
    candidates: int
    beside: int = 0
    """Rows of a chunk, the first of its prefix, in the same forward as the candidates."""

    @property
    def length(self) -> int:
        """Tokens of one user, candidates included. It is also N, because Meta's kernels take one number for both."""
        return self.prefix + self.candidates

    @property
    def rows(self) -> int:
        """Computed rows of all users."""
        return self.users * (self.candidates or self.prefix) + self.beside

    def flops(self, spec: AttentionSpec) -> float:
        """Operations of scores and weighted sums, for each pair of a row and a visible key."""
        seen = self.prefix + 1.0 if self.candidates else (self.prefix + 1) / 2
        pairs = (self.rows - self.beside) * seen + self.beside * (self.beside + 1) / 2
        return 2.0 * (spec.key_width + spec.row_width) * pairs

    def bytes_moved(self, spec: AttentionSpec) -> float:
        """Each prefix's K,V read once, or stored; Q, K, V of the rows read, and A written in float32."""
        elements = self.users * self.prefix * (spec.key_width + spec.row_width)
        elements += self.rows * (2 * spec.key_width + spec.row_width)
        return elements * float(spec.compute_dtype.itemsize) + self.rows * spec.row_width * 4.0


class Contest:
    """All back ends on one case, with the same numbers."""

    def __init__(self, case: AttentionCase, spec: AttentionSpec, kv_dtype: KvDtype, device: Device) -> None:
        """Raises ValueError if N is below the length, because Meta's kernels then skip rows."""
        assert spec.normalizer is not None
        if spec.normalizer < case.length:
            raise ValueError(f"N = {spec.normalizer} is less than the {case.length} tokens of a user")
        geometry = KvGeometry(1, spec.num_heads, spec.attention_dim, spec.hidden_dim, PAGE_TOKENS, kv_dtype)
        pages = geometry.pages_for(case.prefix)
        count = pages * case.users + geometry.pages_for(case.beside)
        self._kv = PagedKv(device.empty_bytes(count, geometry.page_bytes).zero_(), geometry)
        order = np.random.default_rng(0).permutation(count).astype(np.int32)
        rows = case.candidates or case.prefix
        self._segments = [
            Segment(
                pages=order[user * pages : (user + 1) * pages],
                context_tokens=case.prefix if case.candidates else 0,
                causal_rows=0 if case.candidates else case.prefix,
                free_rows=case.candidates,
                stores=not case.candidates,
                total_tokens=case.prefix,
            )
            for user in range(case.users)
        ]
        ranked = list(self._segments)
        if case.beside:
            chunk = Segment(order[pages * case.users :], 0, case.beside, 0, stores=True, total_tokens=case.beside)
            self._segments.insert(0, chunk)
        length = case.length
        dims = [spec.attention_dim, spec.attention_dim, spec.hidden_dim]
        z = torch.randn((case.users, length, spec.num_heads, sum(dims)), device=device.torch_device)
        q, k, v = torch.split(z.to(spec.compute_dtype), dims, dim=-1)
        if case.candidates:
            self._fill(ranked, k[:, : case.prefix].flatten(0, 1), v[:, : case.prefix].flatten(0, 1), case)
        own = [part[:, length - rows :].flatten(0, 1).contiguous() for part in (q, k, v)]
        of_chunk = torch.randn((case.beside, spec.num_heads, sum(dims)), device=device.torch_device)
        chunks = torch.split(of_chunk.to(spec.compute_dtype), dims, dim=-1)
        self._own = [torch.cat((chunk, rest)) for chunk, rest in zip(chunks, own, strict=True)]
        self.jagged = Jagged(
            case.users,
            length,
            rows,
            case.candidates,
            own[0],
            k.flatten(0, 1).contiguous(),
            v.flatten(0, 1).contiguous(),
            spec.alpha,
            int(spec.normalizer),
        )

    def ours(self, attention: AttentionBackend) -> Work:
        """The work of one of our back ends in one layer. The layers of a forward share its preparation."""
        return partial(attention.begin(self._kv, self._segments).attend, 0, *self._own)

    def _fill(self, ranked: list[Segment], k: torch.Tensor, v: torch.Tensor, case: AttentionCase) -> None:
        stored = [
            Segment(segment.pages, 0, case.prefix, 0, stores=True, total_tokens=case.prefix) for segment in ranked
        ]
        self._kv.write(0, self._kv.slots(stored), k, v)


def our_back_ends(spec: AttentionSpec, geometry: KvGeometry, device: Device) -> dict[str, AttentionBackend]:
    """The base, then the one that a worker takes on this device, if it is another one."""
    base, served = BlockedAttention(spec), choose_attention(spec, None, geometry, device)
    return {BASE: base} if served.name == base.name else {BASE: base, served.name: served}


def find_peers() -> dict[str, Callable[[Jagged], Work]]:
    """The kernels that can be imported here, by name. Each function prepares a case."""
    try:
        kernels: Any = importlib.import_module(META)
    except ImportError:
        return {}
    return {"Meta, Triton": lambda case: _meta(kernels, case)}


def _meta(kernels: Any, case: Jagged) -> Work:
    device = case.q.device
    offsets = torch.arange(0, (case.users + 1) * case.length, case.length, dtype=torch.int64, device=device)
    targets = torch.full((case.users,), case.targets, dtype=torch.int64, device=device) if case.targets else None
    common = {"N": case.normalizer, "alpha": case.alpha, "k": case.k, "v": case.v}
    common |= {"seq_offsets": offsets, "num_targets": targets}
    if case.rows == case.length:
        return partial(kernels.triton_hstu_mha, q=case.q, **common)
    return partial(kernels.triton_cached_hstu_mha, delta_q=case.q, **common)


@dataclass(frozen=True, slots=True)
class Peaks:
    """The measured peak rates of the device, in 1e9 per second."""

    gflops: float
    gbytes: float

    def roofline_us(self, case: AttentionCase, spec: AttentionSpec) -> float:
        """The lower limit of the time."""
        return max(case.flops(spec) / self.gflops, case.bytes_moved(spec) / self.gbytes) / 1e3


@dataclass(frozen=True, slots=True)
class Row:
    """One back end on one case."""

    users: int
    prefix_tokens: int
    candidates: int
    beside_rows: int
    back_end: str
    median_us: float
    share_of_peak: float
    share_of_roofline: float
    times_base: float
    error: float
    """The largest difference from the base, as a share of the largest value."""


def measured_peaks(dtype: torch.dtype, device: Device) -> Peaks:
    """Measures a large matrix product, and a large copy within the device's memory."""
    gflops = matrix_peak_gflops(dtype, device)
    source, target = device.empty_bytes(_COPY_BYTES).zero_(), device.empty_bytes(_COPY_BYTES)
    copy_us = median_us(lambda: target.copy_(source), 10, device)
    return Peaks(gflops, 2 * _COPY_BYTES / copy_us / 1e3)


def median_us(work: Work, rounds: int, device: Device) -> float:
    """The median of `rounds` runs after one that is not counted. On CUDA, of a tenth of a second of runs, timed by the
    device with other data in its cache: the host takes longer to start a small kernel than the device to run it.
    """
    if device.torch_device.type == "cuda":
        from triton.testing import do_bench

        return float(do_bench(work, return_mode="median")) * 1e3
    times = []
    for _ in range(rounds + 1):
        start_ns = time.perf_counter_ns()
        work()
        device.synchronize()
        times.append((time.perf_counter_ns() - start_ns) / 1e3)
    return statistics.median(times[1:])


def main(
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, npu.", show_default="the accelerator, else cpu")
    ] = None,
    dtype: Annotated[str, typer.Option(help=f"Element type: {' or '.join(_TYPES)}.")] = "bfloat16",
    users: Annotated[str, typer.Option(help="Numbers of users, comma-separated.")] = "1,4,16,32",
    prefixes: Annotated[str, typer.Option(help="Lengths of prefixes, tokens.")] = "1024,4096,16384",
    candidates: Annotated[str, typer.Option(help="Candidates of a user; 0: compute the prefixes.")] = "0,128,512,2048",
    heads: Annotated[int, typer.Option(min=1, help="Attention heads.")] = 4,
    dim: Annotated[int, typer.Option(min=1, help="Width of a head.")] = 128,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds to measure.")] = 20,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 2,
    beside: Annotated[int, typer.Option(min=0, help="Rows of a chunk beside the candidates.")] = 0,
    json: Annotated[Path | None, typer.Option(help="Writes the rows of the table to this file, as a list.")] = None,
) -> None:
    """Compare attention back ends on one device."""
    set_threads(threads)
    opened = open_device(device)
    compute, kv_dtype = _TYPES[dtype]
    geometry = KvGeometry(1, heads, dim, dim, PAGE_TOKENS, kv_dtype)
    peaks = measured_peaks(compute, opened)
    title = (
        f"{opened.description}, {dtype}, {heads} x {dim}; a matrix product reaches {peaks.gflops:,.0f} GFLOP/s, "
        f"a copy {peaks.gbytes:,.0f} GB/s"
    )
    numbers = ([int(part) for part in text.split(",")] for text in (users, prefixes, candidates))
    user_counts, lengths, counts = numbers
    cases = (
        AttentionCase(user, length, count, beside if count else 0)
        for count in counts
        for length in lengths
        for user in user_counts
    )
    rows: list[Row] = []
    for case in cases:
        spec = AttentionSpec(heads, dim, dim, dim**-0.5, float(case.length), compute_dtype=compute)
        back_ends = our_back_ends(spec, geometry, opened)
        contest = Contest(case, spec, kv_dtype, opened)
        expected, base_us = None, 0.0
        works = {name: contest.ours(attention) for name, attention in back_ends.items()}
        if not case.beside:
            works |= {name: prepare(contest.jagged) for name, prepare in find_peers().items()}
        for name, work in works.items():
            out = work().float().flatten()
            expected = out if expected is None else expected
            took_us = median_us(work, rounds, opened)
            base_us = base_us or took_us
            rows.append(
                Row(
                    users=case.users,
                    prefix_tokens=case.prefix,
                    candidates=case.candidates,
                    beside_rows=case.beside,
                    back_end=name,
                    median_us=took_us,
                    share_of_peak=case.flops(spec) / took_us / 1e3 / peaks.gflops,
                    share_of_roofline=peaks.roofline_us(case, spec) / took_us,
                    times_base=base_us / took_us,
                    error=float((out - expected).abs().max() / expected.abs().max()),
                )
            )
    _print(rows, title)
    if json is not None:
        json.write_text(dump_json([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")


def _print(rows: Sequence[Row], title: str) -> None:
    table = Table(title=title)
    measures = ("us", "of the peak", "of the roofline", "times the base", "error")
    for column in ("users", "prefix", "candidates", "back end", *measures):
        table.add_column(column, justify="left" if column == "back end" else "right")
    for row in rows:
        table.add_row(
            str(row.users),
            f"{row.prefix_tokens:,}",
            str(row.candidates or "-"),
            row.back_end,
            f"{row.median_us:,.0f}",
            f"{row.share_of_peak:.0%}",
            f"{row.share_of_roofline:.0%}",
            f"{row.times_base:.1f}",
            f"{row.error:.0e}",
        )
    Console().print(table)


if __name__ == "__main__":
    from relaygr.cli.app import run

    run(main)
