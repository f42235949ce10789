"""The same impressions for three fleets of as many workers: together, with a store, with workers for jobs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from relaygr.runtime.errors import RelayError
from relaygr.simulate.case import Case, Pool
from relaygr.simulate.figures import Figures
from relaygr.simulate.fleet import Runner, simulate_as_one
from relaygr.simulate.ratio import OPPOSITE, Correction, Move, Signals, ratio_of
from relaygr.simulate.size import size_of

OnSimulation = Callable[[str, float], None]
"""Gets the fleet that is simulated now, and the share of its simulations that have ended."""


def compare(
    case: Case, workers: int, us_per_byte: float, seeds: int, runner: Runner, on_simulation: OnSimulation
) -> dict[str, Figures]:
    """The figures of each fleet. `case`: without a pool. The number of workers for jobs is that of the ratio, corrected
    by the two signals.

    Raises RelayError for a case that is not simulated with a pool.
    """
    _check(case, workers)

    def figures(name: str, pool: Pool | None) -> Figures:
        one, owners = (case, workers) if pool is None else (case.with_pool(pool), workers - pool.workers)
        return simulate_as_one(one, owners, seeds, runner, partial(on_simulation, name))

    pools: dict[int, Figures] = {}

    def signals(count: int) -> Signals:
        if count not in pools:
            pools[count] = figures(_name(count, workers), Pool(us_per_byte, count))
        return Signals(pools[count].answer_ms.value, pools[count].prefix_share.value)

    fleets = {name: figures(name, pool) for name, pool in (("relay", None), ("relay + store", Pool(us_per_byte)))}
    ratio = ratio_of(case, size_of(case, workers, case.demand.traffic.duration_s), us_per_byte)
    # Beside its device time, an answer takes two hops, a look-up, and the time to write it.
    beside_us = 2 * case.times.hop_us[len(case.times.hop_us) // 2] + case.times.look_up_us + case.times.answer_us
    settled = settle(signals, workers, ratio.split(workers), (ratio.rank_us + beside_us) / 1000)
    return fleets | {_name(settled, workers): pools[settled]}


def settle(signals: Callable[[int], Signals], workers: int, first: int, hit_ms: float) -> int:
    """The number of workers for jobs at which `Correction` holds, from `first` on."""
    state, count = Correction(hit_ms), first
    while True:
        bounds = {Move.PRE_INFER: count < workers - 1, Move.RANKING: count > 1}
        state, move = state.after(signals(count), frozenset(each for each in OPPOSITE if bounds[each]))
        if move is Move.HOLD:
            return count
        count += 1 if move is Move.PRE_INFER else -1


def _name(count: int, workers: int) -> str:
    """The workers for jobs, and those that rank."""
    return f"pool {count} + {workers - count}"


def _check(case: Case, workers: int) -> None:
    longest = case.model.limits.max_prefix_behaviours
    if workers < 2:
        raise RelayError("A pool needs a worker for jobs and one that ranks: give --workers 2 or more.")
    if case.refresh_s is not None:
        raise RelayError("New weights are not simulated with a pool: leave out --refresh.")
    if not case.model.rules.is_reusable:
        raise RelayError("The prefixes of this model serve one impression only, so it does not use a pool.")
    if case.demand.traffic.history_max > longest:
        raise RelayError(f"A pool is simulated with histories that the model takes whole: up to {longest} (--lengths).")
