"""All that a worker can have ready before it owns anything: the slow part of a start.

A prepared worker has its model loaded and its device warm, its history store open and its producers connected. It
reads no topic, and writes nothing that an active worker of its id relies on.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import structlog
from confluent_kafka import KafkaException, Producer

from relaygr.admission.latency import Corrector, LatencyModel
from relaygr.kafka.clients import ProducerKind, make_producer
from relaygr.kafka.dead_letters import DeadLetterWriter
from relaygr.runtime.errors import RelayError
from relaygr.schemas.topics import Topic
from relaygr.worker.calibration import calibrate, latency_for, save_calibration
from relaygr.worker.dram_check import require_precision
from relaygr.worker.history.store import HistoryStore
from relaygr.worker.measuring import EngineMeter, bind_own_arena
from relaygr.worker.memory import MemoryPlan, require_host_memory
from relaygr.worker.model.engine import load_engine
from relaygr.worker.model.interface import Engine
from relaygr.worker.process.handover import Handover, attach
from relaygr.worker.process.memory import TakenMemory, arena_shape, plan_memory, take_memory
from relaygr.worker.settings import StandbyMemory, WorkerConfig, WorkerSettings
from relaygr.worker.shared.arena import make_room
from relaygr.worker.shared.lock import ArenaLock

log = structlog.get_logger()

_CALIBRATION_NAME: Final = "calibration.json"
_TOKENS: Final = (64, 256, 1024)
_CANDIDATES: Final = (16, 128)
_ROUNDS: Final = 2


@dataclass(slots=True)
class Prepared:
    """What was made ready. `corrector` belongs to the device thread once that runs. `memory` None: taken later.

    `engine` is the model that serves: another one after a reload (`reloading`), so that the old one's memory is free.
    """

    engine: Engine
    plan: MemoryPlan
    handover: Handover
    memory: TakenMemory | None
    corrector: Corrector
    producer: Producer
    dead_letters: DeadLetterWriter
    follower_letters: DeadLetterWriter
    store: HistoryStore


def prepare(config: WorkerConfig, folder: Path, lock: ArenaLock, *, is_standby: bool, keeps_prefixes: bool) -> Prepared:
    """Makes everything ready; `folder` is the shared one. A standby disturbs nothing that the active one has.

    With `keeps_prefixes` the DRAM tier outlives the process. Raises RelayError for what the user can mend.
    """
    kafka, settings = config.kafka, config.worker
    engine = load_engine(
        settings.model,
        settings.device,
        settings.kv_dtype,
        settings.page_tokens,
        settings.threads,
        settings.compute_dtype,
        settings.cuda_graphs,
    )
    _check_dram(engine, settings)
    plan = plan_memory(engine, settings, keeps_prefixes=keeps_prefixes)
    shape = arena_shape(engine, settings) if keeps_prefixes else None
    require_host_memory(plan, engine.device.is_cpu, make_room(folder, shape, lock) if shape is not None else 0)
    handover = attach(config, engine, folder, lock, keeps_prefixes=keeps_prefixes)
    memory = None
    if is_standby and settings.standby_memory is StandbyMemory.AT_TAKEOVER:
        bind_own_arena(engine)
    else:
        memory = take_memory(engine, settings, handover.dram)
    latency = _measured_latency(engine, settings, folder, undisturbed=not is_standby)
    producer = make_producer(kafka, ProducerKind.LATENCY, f"{config.client_id}-results")
    dead_letters = DeadLetterWriter(kafka, config.client_id)
    follower_letters = DeadLetterWriter(kafka, f"{config.client_id}-history")
    store = HistoryStore.open(settings.history_path, settings.history_max_bytes)
    _connect(producer, config)
    return Prepared(engine, plan, handover, memory, Corrector(latency), producer, dead_letters, follower_letters, store)


def _check_dram(engine: Engine, settings: WorkerSettings) -> None:
    """Raises RelayError if the DRAM tier's element type changes scores by more than the settings allow."""
    if not settings.dram_bytes:
        return
    error = require_precision(
        engine,
        settings.model,
        settings.dram_kv_dtype,
        settings.dram_max_score_error,
        settings.dram_min_topk_overlap,
    )
    if error is not None:
        log.info(
            "scores on reloaded prefixes are approximate",
            dram_kv_dtype=settings.dram_kv_dtype.value,
            max_score_error=round(error.max_score_error, 6),
            mean_score_error=round(error.mean_score_error, 6),
            top10_overlap=round(error.topk_overlap, 4),
        )


def _connect(producer: Producer, config: WorkerConfig) -> None:
    """Its first message need not wait for metadata. Raises RelayError if the broker went away."""
    try:
        for topic in (Topic.RESULTS, Topic.DEAD_LETTERS, Topic.WORKERS):
            producer.list_topics(config.kafka.topic(topic), timeout=config.kafka.connect_timeout_s)
    except KafkaException as error:
        raise RelayError(f"Kafka at {config.kafka.bootstrap} does not answer any more: {error.args[0]}.") from error


def _measured_latency(engine: Engine, settings: WorkerSettings, folder: Path, *, undisturbed: bool) -> LatencyModel:
    """The engine must be bound to an arena that holds nothing yet.

    `undisturbed`: the device is this process's alone. Raises RelayError for a calibration file that was given
    and is none, or not this worker's.
    """
    if settings.calibration is not None:
        latency = latency_for(engine, settings.calibration)
    elif undisturbed:
        calibration = calibrate(engine)
        log.info("device calibrated", device=engine.device.name, **asdict(calibration.coefficients))
        save_calibration(calibration, folder / _CALIBRATION_NAME)
        return calibration.model
    else:
        latency = _left_by_the_active(engine, folder / _CALIBRATION_NAME)
    _warm_up(engine)
    return latency


def _warm_up(engine: Engine) -> None:
    """A few small passes of each kind. Overwrites the arena's first pages."""
    meter = EngineMeter(engine)
    for _ in range(_ROUNDS):
        for tokens in _TOKENS:
            length = min(tokens, meter.longest_tokens)
            meter.prefix(length, length)
            for candidates in _CANDIDATES:
                meter.rank(length, min(candidates, engine.limits.max_candidates))


def _left_by_the_active(engine: Engine, path: Path) -> LatencyModel:
    try:
        return latency_for(engine, path)
    except RelayError as error:
        log.warning("calibrated beside a busy worker: times may be too long", cause=str(error))
        return calibrate(engine).model
