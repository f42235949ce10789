"""The slow part of a start: everything that a worker can do before it owns partitions.

A prepared worker has loaded its model, warmed up its device, opened its history store and connected its producers. It
has read no topic, and has changed no file that an active worker with the same id uses.

A primary worker calibrates while it has the device to itself. A standby shares the device with an active worker, which
would make its measurements wrong. So it uses the calibration that the active worker left in the shared folder, and
computes its products with the same library.
"""

from __future__ import annotations

import contextlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import structlog
from confluent_kafka import KafkaException, Producer

from relaygr.admission.latency import Corrector, LatencyModel
from relaygr.kafka.clients import ProducerKind, make_producer
from relaygr.kafka.dead_letters import DeadLetterWriter
from relaygr.kafka.statistics import kafka_statistics
from relaygr.runtime.errors import RelayError
from relaygr.schemas.topics import Topic
from relaygr.worker.cache.trace.recorder import require_writable
from relaygr.worker.calibration import calibrate, latency_for, load_calibration, save_calibration
from relaygr.worker.history.store import HistoryStore
from relaygr.worker.measuring import EngineMeter, bind_own_arena
from relaygr.worker.memory import MemoryPlan, process_bytes, require_host_memory
from relaygr.worker.model.engine import load_engine
from relaygr.worker.model.interface import Engine
from relaygr.worker.model.layer_parts import use_onednn
from relaygr.worker.process.handover import Handover, attach
from relaygr.worker.process.memory import AllocatedMemory, allocate_memory, arena_shape, plan_memory
from relaygr.worker.score_error import ScoreError, require_compute_precision, require_kv_precision, require_precision
from relaygr.worker.settings import StandbyMemory, WorkerConfig, WorkerSettings
from relaygr.worker.shared.arena import make_room
from relaygr.worker.shared.lock import ArenaLock

log = structlog.get_logger()

_CALIBRATION_FILE: Final = "calibration.json"
_TOKENS: Final = (64, 256, 1024)
_CANDIDATES: Final = (16, 128)
_ROUNDS: Final = 2


@dataclass(slots=True)
class Prepared:
    """The parts that exist before activation. `memory` None: allocated at the take-over.

    `corrector` belongs to the device thread once that thread runs. A reload replaces `engine` (see `reloading`), so
    that the old model's memory is freed.
    """

    engine: Engine
    plan: MemoryPlan
    handover: Handover
    memory: AllocatedMemory | None
    corrector: Corrector
    producer: Producer
    dead_letters: DeadLetterWriter
    follower_letters: DeadLetterWriter
    store: HistoryStore


def prepare(config: WorkerConfig, folder: Path, lock: ArenaLock, *, is_standby: bool, keeps_prefixes: bool) -> Prepared:
    """Prepares a worker. `folder` is its shared folder. A standby changes nothing that the active worker uses.

    `keeps_prefixes`: the DRAM tier outlives the process. Raises RelayError for a mistake that the user can correct.
    """
    kafka, settings = config.kafka, config.worker
    store = _open_files(settings)
    own_bytes = process_bytes()
    calibrated = settings.calibration or (folder / _CALIBRATION_FILE if is_standby else None)
    if calibrated is not None:
        _compute_as_calibrated(calibrated)
    engine = load_engine(
        settings.model,
        settings.device,
        settings.kv_dtype,
        settings.page_tokens,
        settings.threads,
        settings.compute_dtype,
        settings.cuda_graphs,
        int(settings.device_table_bytes),
    )
    _check_kv(engine, settings)
    _check_compute(engine, settings)
    _check_dram(engine, settings)
    plan = plan_memory(engine, settings, own_bytes, keeps_prefixes=keeps_prefixes)
    shape = arena_shape(engine, settings) if keeps_prefixes else None
    require_host_memory(plan, engine.device.is_cpu, make_room(folder, shape, lock) if shape is not None else 0)
    handover = attach(config, engine, folder, lock, keeps_prefixes=keeps_prefixes)
    memory = None
    if is_standby and settings.standby_memory is StandbyMemory.AT_TAKEOVER:
        bind_own_arena(engine)
    else:
        memory = allocate_memory(engine, settings, handover.dram)
    latency = _measured_latency(engine, settings, folder, undisturbed=not is_standby)
    reporting = kafka_statistics().options(kafka.statistics_interval_ms)
    producer = make_producer(kafka, ProducerKind.LATENCY, f"{config.client_id}-results", options=reporting)
    dead_letters = DeadLetterWriter(kafka, config.client_id)
    follower_letters = DeadLetterWriter(kafka, f"{config.client_id}-history")
    _connect(producer, config)
    return Prepared(engine, plan, handover, memory, Corrector(latency), producer, dead_letters, follower_letters, store)


def _open_files(settings: WorkerSettings) -> HistoryStore:
    """Opens the history store, before the slow part of the start.

    Raises RelayError if the files of `worker.history_path` and `worker.cache_trace` cannot be written, or if another
    worker uses the history store.
    """
    store = HistoryStore.open(settings.history_path, settings.history_max_bytes)
    store.claim(settings.worker_id)
    if settings.cache_trace is not None:
        require_writable(settings.cache_trace)
    return store


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
        what = "scores on reloaded prefixes are approximate"
        _log_error(what, error, dram_kv_dtype=settings.dram_kv_dtype.value)


def _check_kv(engine: Engine, settings: WorkerSettings) -> None:
    """Raises RelayError if K,V in 8 bits change scores by more than the settings allow."""
    error = require_kv_precision(
        engine,
        settings.model,
        settings.kv_max_score_error,
        settings.kv_min_topk_overlap,
        int(settings.device_table_bytes),
    )
    if error is not None:
        _log_error("scores on K,V in 8 bits are approximate", error, kv_dtype=engine.geometry.dtype.value)


def _check_compute(engine: Engine, settings: WorkerSettings) -> None:
    """Raises RelayError if products in int8 change scores by more than the settings allow."""
    error = require_compute_precision(
        engine,
        settings.model,
        settings.compute_max_score_error,
        settings.compute_min_topk_overlap,
        int(settings.device_table_bytes),
    )
    if error is not None:
        _log_error("scores by products in int8 are approximate", error)


def _log_error(event: str, error: ScoreError, **setting: str) -> None:
    log.info(
        event,
        **setting,
        max_score_error=round(error.max_score_error, 6),
        mean_score_error=round(error.mean_score_error, 6),
        top10_overlap=round(error.topk_overlap, 4),
    )


def _connect(producer: Producer, config: WorkerConfig) -> None:
    """Fetches metadata before the first message needs it. Raises RelayError if the broker does not answer."""
    try:
        for topic in (Topic.RESULTS, Topic.DEAD_LETTERS, Topic.WORKERS):
            producer.list_topics(config.kafka.topic(topic), timeout=config.kafka.connect_timeout_s)
    except KafkaException as error:
        raise RelayError(f"Kafka at {config.kafka.bootstrap} no longer answers: {error.args[0]}.") from error


def _measured_latency(engine: Engine, settings: WorkerSettings, folder: Path, *, undisturbed: bool) -> LatencyModel:
    """Calibrates or reads a calibration, then warms up. The engine's arena must be empty.

    `undisturbed`: no other process uses the device. Raises RelayError if the file in `worker.calibration` is not a
    calibration of this worker.
    """
    if settings.calibration is not None:
        latency = latency_for(engine, settings.calibration)
    elif undisturbed:
        calibration = calibrate(engine)
        log.info("device calibrated", device=engine.device.name, **asdict(calibration.coefficients))
        save_calibration(calibration, folder / _CALIBRATION_FILE)
        return calibration.model
    else:
        latency = _calibration_of_active(engine, folder / _CALIBRATION_FILE)
    _warm_up(engine)
    return latency


def _warm_up(engine: Engine) -> None:
    """Runs a few small forwards of each kind. Overwrites the arena's first pages."""
    meter = EngineMeter(engine)
    for _ in range(_ROUNDS):
        for tokens in _TOKENS:
            length = min(tokens, meter.longest_tokens)
            meter.prefix(length, length)
            for candidates in _CANDIDATES:
                meter.rank(length, min(candidates, engine.limits.max_candidates))


def _compute_as_calibrated(path: Path) -> None:
    """Chooses oneDNN or torch as in a calibration. Without a calibration, this process measures.

    Whether products are compiled depends on the installed packages and the processor: `latency_for` compares it.
    """
    with contextlib.suppress(RelayError):
        choice = load_calibration(path).machine.uses_onednn
        if choice is not None:
            use_onednn(choice)


def _calibration_of_active(engine: Engine, path: Path) -> LatencyModel:
    try:
        return latency_for(engine, path)
    except RelayError as error:
        log.warning("calibrated while another worker uses the device: times may be too long", cause=str(error))
        return calibrate(engine).model
