"""A gateway of some version: asks once for scores, and prints how the request ended and how many scores came."""

from __future__ import annotations

import sys

from relaygr.client import RelayClient
from relaygr.kafka.settings import KafkaSettings


def main() -> None:
    kafka = KafkaSettings.model_validate_json(sys.argv[1])
    with RelayClient(kafka, "gw-0") as client:
        answer = client.rank("a user", [1, 2, 3], budget_ms=20_000)
    assert answer.result is not None, answer.reason
    sys.stdout.write(f"{answer.result.outcome} {len(answer.result.scores) // answer.result.num_tasks}")


if __name__ == "__main__":
    main()
