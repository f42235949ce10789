"""What decides the result of a training, beside its log and `--protocol`: options of `relaygr train`, each given once.

The module imports neither torch nor numpy, so that `--help` answers without them.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Annotated, Final

from annotated_types import Ge, Le

from relaygr.runtime.options import Option

_THREADS: Final = Option("CPU threads. Another number gives other roundings.")
_VALIDATION_USERS: Final = Option("The most users of a validation; 0: all.")
_TEST_USERS: Final = Option("The most users of the test; 0: all.")


class Protocol(enum.StrEnum):
    """How the behaviours are split (`splits.py`)."""

    TIME = "time"
    LEAVE_ONE_OUT = "leave-one-out"
    GLOBAL_TIME = "global-time"


class Stage(enum.StrEnum):
    """What is trained (`trainer.py`)."""

    SEQUENCE = "sequence"
    CANDIDATES = "candidates"


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """Of a ranker. The same options, log and machine give the same checkpoint."""

    protocol: Protocol = Protocol.TIME
    dim: Annotated[int, Ge(2), Le(4096), Option("Width of a row.")] = 64
    heads: Annotated[int, Ge(1), Option("Attention heads.")] = 1
    layers: Annotated[int, Ge(1), Option("Number of layers.")] = 2
    max_history: Annotated[
        int, Ge(8), Le(8192), Option("Behaviours of the longest history that is trained and served.")
    ] = 1024
    epochs: Annotated[int, Ge(1), Option("The most epochs on sequences, which train retrieval and liked.")] = 40
    candidate_epochs: Annotated[
        int, Ge(1), Option("The most epochs on candidates, which train next, after those on sequences.")
    ] = 3
    patience: Annotated[int, Ge(1), Option("End a stage after so many epochs without a better validation.")] = 5
    places: Annotated[
        int, Ge(1), Option("The least places of a user with candidates in an epoch; long histories have more.")
    ] = 16
    """A long window has a sixteenth of its length."""
    negatives: Annotated[
        int, Ge(1), Option("Items beside the next one at each place: half are found by retrieval, half random.")
    ] = 31
    learning_rate: Annotated[float, Ge(1e-7), Le(1.0), Option("Learning rate of Adam.")] = 1e-3
    dropout: Annotated[float, Ge(0.0), Le(0.9), Option("Share of each product's inputs left out.")] = 0.2
    validation_users: Annotated[int, Ge(0), _VALIDATION_USERS] = 500
    test_users: Annotated[int, Ge(0), _TEST_USERS] = 0
    max_minutes: Annotated[
        float, Ge(0.0), Option("Stop training when this time is over; 0: never.", shown_default="0")
    ] = 0.0
    """The learning rate falls with the time, so the result depends on the machine."""
    seed: Annotated[int, Ge(0), Le(10**13), Option("The same seed gives the same checkpoint on this machine.")] = 0
    """At most so large that torch takes its product with the epoch's factor (`trainer.py`)."""
    threads: Annotated[int, Ge(1), _THREADS] = 2

    def epochs_of(self, stage: Stage) -> int:
        """The most epochs of a stage."""
        return self.epochs if stage is Stage.SEQUENCE else self.candidate_epochs


@dataclass(frozen=True, slots=True)
class PostTrainingOptions:
    """Of post-training, beside the run that it starts from."""

    start: str
    """Revision of the ranker."""
    steps: Annotated[int, Ge(3), Option("Batches of each arm and seed.")] = 400
    group: Annotated[int, Ge(2), Le(256), Option("Slates drawn for a request.")] = 16
    negatives: Annotated[
        int, Ge(1), Option("Candidates of a request beside the next item: half are found by retrieval, half random.")
    ] = 127
    learning_rate: Annotated[float, Ge(1e-7), Le(1.0), Option("Rate of Adam; falls to zero.")] = 4e-4
    kl_weight: Annotated[float, Ge(0.0), Option("Weight of the divergence from the ranker of RUN.")] = 0.001
    validation_users: Annotated[int, Ge(0), _VALIDATION_USERS] = 500
    test_users: Annotated[int, Ge(0), _TEST_USERS] = 0


@dataclass(frozen=True, slots=True)
class RetrievalOptions:
    """Of retrieval over two domains. A step is one update of the weights."""

    intra_steps: Annotated[int, Ge(1), Option("Steps of stage 1, in each domain by itself.")] = 150
    inter_steps: Annotated[int, Ge(2), Option("Steps of stage 2, every second one across domains.")] = 250
    cold_share: Annotated[
        float, Ge(0.0), Le(0.9), Option("Share of the common users whose rows of LOG_A are left out.")
    ] = 0.1
    threads: Annotated[int, Ge(1), _THREADS] = 1

    @property
    def steps(self) -> int:
        """Of every arm."""
        return self.intra_steps + self.inter_steps
