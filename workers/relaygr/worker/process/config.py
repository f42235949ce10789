"""The settings of one worker process."""

from __future__ import annotations

from dataclasses import dataclass

from relaygr.admission.settings import AdmissionSettings
from relaygr.consumer import ConsumerSettings
from relaygr.kafka.settings import KafkaSettings
from relaygr.worker.settings import WorkerSettings


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """The sections that a worker reads, together."""

    kafka: KafkaSettings
    worker: WorkerSettings
    admission: AdmissionSettings
    consumer: ConsumerSettings

    @property
    def client_id(self) -> str:
        """What the broker's logs call this worker's clients."""
        return f"relaygr-{self.worker.worker_id}"
