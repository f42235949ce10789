"""What `/readyz` and `/healthz` of a worker say."""

from __future__ import annotations

from relaygr.consumer import LoopState
from relaygr.runtime.clock import Clock
from relaygr.runtime.probes import Check, Readiness
from relaygr.schemas.messages import WorkerState
from relaygr.worker.process.parts import Parts

LONGEST_SILENCE_US = 30_000_000
"""A poll thread that was not heard of for so long hangs."""

WAITING = Readiness((Check("active", False, "standby: waits for the active worker's end"),))
"""A standby's answer."""


def readiness(parts: Parts) -> Readiness:
    """Ready = assigned, history caught up, model warm, broker reachable."""
    loop = parts.loop.status()
    loading = parts.follower.loading
    state = parts.report.state
    return Readiness(
        (
            Check("assigned", loop.assigned, f"{len(loop.partitions)} partitions"),
            Check("history", not loading, f"{len(loading)} partitions still loading" if loading else ""),
            Check("broker", loop.broker_reachable),
            Check("consumer", not loop.stalled and loop.state is LoopState.RUNNING, loop.state.value),
            Check("running", state is WorkerState.READY, state.value),
        )
    )


def health(parts: Parts, clock: Clock) -> Readiness:
    """Healthy = device and poll thread move."""
    silent_us = clock.monotonic_us() - parts.loop.status().last_poll_us
    return Readiness(
        (
            Check("device", not parts.device.is_stuck()),
            Check("poll thread", silent_us < LONGEST_SILENCE_US, f"last poll {silent_us // 1000} ms ago"),
        )
    )
