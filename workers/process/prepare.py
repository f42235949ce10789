"""All that a worker can have ready before it owns anything: the slow part of a start.

A prepared worker has its model loaded, its memory taken, its device measured, its history store open and its
producers connected. It reads no topic, writes nothing, and runs no thread but the copy threads of its cache.
"""

from __future__ import annotations

from dataclasses import dataclass

from confluent_kafka import KafkaException, Producer

from schemas.topics import Topic
from streams.clients import ProducerKind, make_producer
from streams.dead_letters import DeadLetterWriter
from streams.errors import RelayError
from streams.latency import Corrector
from workers.calibration import latency_for
from workers.history.store import HistoryStore
from workers.memory import MemoryPlan, require_host_memory
from workers.model.engine import Engine, load_engine
from workers.process.config import WorkerConfig
from workers.process.memory import TakenMemory, plan_memory, take_memory


@dataclass(frozen=True, slots=True)
class Prepared:
    """What was made ready. `corrector` belongs to the device thread once that runs."""

    engine: Engine
    plan: MemoryPlan
    memory: TakenMemory
    corrector: Corrector
    producer: Producer
    dead_letters: DeadLetterWriter
    follower_letters: DeadLetterWriter
    store: HistoryStore


def prepare(config: WorkerConfig) -> Prepared:
    """Makes everything ready. Raises RelayError for what the user can mend."""
    kafka, settings = config.kafka, config.worker
    engine = load_engine(settings.model, settings.device, settings.kv_dtype, settings.page_tokens, settings.threads)
    plan = plan_memory(engine, settings)
    require_host_memory(plan, engine.device.is_cpu)
    memory = take_memory(engine, settings)
    latency = latency_for(engine, settings.calibration)
    memory.built.cache.weigh_by(latency.pre_us)
    producer = make_producer(kafka, ProducerKind.LATENCY, f"{config.client_id}-results")
    dead_letters = DeadLetterWriter(kafka, config.client_id)
    follower_letters = DeadLetterWriter(kafka, f"{config.client_id}-history")
    store = HistoryStore.open(settings.history_path, settings.history_max_bytes)
    _warm_up(producer, config)
    return Prepared(engine, plan, memory, Corrector(latency), producer, dead_letters, follower_letters, store)


def _warm_up(producer: Producer, config: WorkerConfig) -> None:
    """Its first message need not wait for metadata. Raises RelayError if the broker went away."""
    try:
        for topic in (Topic.RESULTS, Topic.DEAD_LETTERS, Topic.WORKERS):
            producer.list_topics(config.kafka.topic(topic), timeout=config.kafka.connect_timeout_s)
    except KafkaException as error:
        raise RelayError(f"Kafka at {config.kafka.bootstrap} does not answer any more: {error.args[0]}.") from error
