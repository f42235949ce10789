"""Stops and kills brokers of a cluster of three under load: `python -m benchmarks.brokers`.

Users send requests on a fixed schedule to one worker, while one of four things happens: a broker that leads a third of
the partitions is killed (`kill`) or stopped (`stop`) and started again, all brokers are restarted one after the other
(`rolling`), or two of three are stopped and started again (`two_stopped`). Each adds a line to a CSV: requests by
outcome, lost and late ones, the longest wait of a ranked request, and the longest time without a ranked result.

Cluster, worker and users share the cores of this machine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from relaygr.kafka.settings import Acks


def main(
    rounds: Annotated[int, typer.Option(min=1, help="How often each thing happens.")] = 2,
    rate: Annotated[float, typer.Option(min=1, help="Requests a second.")] = 40.0,
    budget_ms: Annotated[float, typer.Option(min=10, help="Time from a request to its deadline.")] = 500.0,
    acks: Annotated[Acks, typer.Option(help="request_acks")] = Acks.ALL,
    broker_session_ms: Annotated[int, typer.Option(min=1000, help="broker.session.timeout.ms")] = 2000,
    out: Annotated[Path, typer.Option(help="CSV to append to.")] = Path("benchmarks/results/brokers/results.csv"),
) -> None:
    """Measure the cost of losing a broker of three."""
    from relaygr.bench.brokers.run import Load, measure_outages

    measure_outages(rounds, Load(rate, budget_ms, acks, broker_session_ms), out)


if __name__ == "__main__":
    from relaygr.cli.app import run

    run(main)
