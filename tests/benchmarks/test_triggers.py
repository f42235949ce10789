"""The benchmark of several trigger processes, on a real Kafka, small."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from relaygr.bench.triggers.run import Plan, measure_triggers
from relaygr.devbroker import LocalBroker


@pytest.mark.kafka
@pytest.mark.timeout(280)
def test_two_processes_are_measured_on_a_full_topic_at_a_part_of_their_rate_and_while_they_rebalance(
    real_broker: LocalBroker, tmp_path: Path
) -> None:
    """A busy machine bounds what is read, but not what may be admitted."""
    rows = measure_triggers(
        Plan((2,), 1_000, 0.5, 5.0), real_broker.bootstrap, tmp_path / "out.csv", tmp_path / "out.json"
    )
    assert [(row.phase, row.processes) for row in rows] == [("drain", "2"), ("steady", "2"), ("rebalance", "1 2 3 2")]
    assert all(row.decided_per_s > 0 for row in rows)
    assert all(row.jobs > 0 for row in rows[1:])
    assert [row["phase"] for row in json.loads((tmp_path / "out.json").read_text())] == ["drain", "steady", "rebalance"]
    # A drain this short ends while the processes still learn how much ranking there is. A burst of half a second may
    # come on top of the budget of a short run.
    for row in rows[1:]:
        assert row.jobs <= row.budget_jobs * 1.05 + 0.5 * row.budget_jobs / row.seconds
