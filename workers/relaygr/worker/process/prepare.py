"""The slow part of a start: everything that a worker can do before it owns partitions.

A prepared worker has loaded its model, warmed up its device, opened its history store and connected its producers. It
has read no topic, and has changed no file that an active worker with the same id uses.

A standby shares the device with an active worker, which would make its measurements wrong. So it uses the calibration
that the active worker left in the shared folder, and computes its products with the same library.
"""

from __future__ import annotations

import contextlib
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Final

import structlog
from confluent_kafka import KafkaException, Producer

from relaygr.admission.corrector import Corrector
from relaygr.admission.latency import LatencyModel
from relaygr.kafka.clients import ProducerKind
from relaygr.kafka.session import KafkaSession
from relaygr.runtime.errors import RelayError
from relaygr.schemas.topics import Topic
from relaygr.worker.calibration import calibrate, latency_for, load_calibration, model_of, save_calibration
from relaygr.worker.history.store import HistoryStore
from relaygr.worker.measuring import EngineMeter, bind_own_arena
from relaygr.worker.memory import MemoryPlan, process_bytes, require_host_memory, resident_bytes
from relaygr.worker.model.engine import NoMemoryForWeightsError, load_engine
from relaygr.worker.model.interface import Engine
from relaygr.worker.model.layer_parts import use_onednn
from relaygr.worker.process.allocation import AllocatedMemory, allocate_memory, arena_shape, plan_memory
from relaygr.worker.process.handover import Handover, attach
from relaygr.worker.process.trial import require_finite_scores, require_precisions, require_rules
from relaygr.worker.settings import StandbyMemory, WorkerConfig, WorkerSettings
from relaygr.worker.shared.dram_tier import ArenaShape, delete_abandoned, lacks_space, make_room
from relaygr.worker.shared.lock import ArenaLock

log = structlog.get_logger()

_CALIBRATION_FILE: Final = "calibration.json"
_TOKENS: Final = (64, 256, 1024)
_CANDIDATES: Final = (16, 128)
_ROUNDS: Final = 2


@dataclass(slots=True)
class Prepared:
    """What exists before activation. `memory` None: allocated at the take-over.

    `corrector` belongs to the device thread once that thread runs. A reload replaces `engine` (see `reloading`), so
    that the old model's memory is freed.
    """

    engine: Engine
    model: Path
    """The folder of `engine` at the start, without links."""
    plan: MemoryPlan
    handover: Handover
    memory: AllocatedMemory | None
    corrector: Corrector
    session: KafkaSession
    producer: Producer
    store: HistoryStore


def prepare(
    config: WorkerConfig,
    session: KafkaSession,
    folder: Path,
    lock: ArenaLock,
    *,
    is_standby: bool,
    keeps_prefixes: bool,
) -> Prepared:
    """Prepares a worker. `folder` is its shared folder. A standby changes nothing that the active worker uses.

    `keeps_prefixes`: the DRAM tier outlives the process. Raises RelayError for a mistake that the user can correct.
    """
    # `worker.model` may be a link that a deploy points at another revision meanwhile.
    settings = config.worker.model_copy(update={"model": config.worker.model.resolve()})
    store = _open_files(settings)
    before_bytes = resident_bytes()
    calibrated = settings.calibration or (folder / _CALIBRATION_FILE if is_standby else None)
    if calibrated is not None:
        _compute_as_calibrated(calibrated)
    engine = _load(settings, folder, lock)
    require_finite_scores(engine, settings.model, store)
    require_rules(engine, settings.model)
    require_precisions(engine, settings)
    plan = plan_memory(engine, settings, process_bytes(before_bytes, engine), keeps_prefixes=keeps_prefixes)
    shape = arena_shape(engine, settings) if keeps_prefixes else None
    _require_memory(plan, engine.device.is_cpu, folder, shape, make_room(folder, shape, lock))
    handover = attach(config, engine, folder, lock, keeps_prefixes=keeps_prefixes)
    memory = None
    if is_standby and settings.standby_memory is StandbyMemory.AT_TAKEOVER:
        bind_own_arena(engine)
    else:
        memory = allocate_memory(engine, settings, handover.dram)
    latency = _measured_latency(engine, settings, folder, is_alone=not is_standby)
    producer = session.producer(ProducerKind.LATENCY, f"{config.client_id}-results")
    _connect(producer, config)
    return Prepared(
        engine,
        settings.model,
        plan,
        handover,
        memory,
        Corrector(latency),
        session,
        producer,
        store,
    )


def _load(settings: WorkerSettings, folder: Path, lock: ArenaLock) -> Engine:
    load = partial(
        load_engine,
        settings.model,
        settings.device,
        settings.kv_dtype,
        settings.page_tokens,
        settings.threads,
        settings.compute_dtype,
        settings.cuda_graphs,
        int(settings.device_table_bytes),
        settings.ranker_modules,
    )
    try:
        return load()
    except NoMemoryForWeightsError:
        # A killed worker may have left its arena.
        make_room(folder, None, lock)
        delete_abandoned(folder)
        return load()


def _open_files(settings: WorkerSettings) -> HistoryStore:
    """Opens the history store, before the slow part of the start.

    Raises RelayError if the files of `worker.history_path` cannot be written, or if another worker uses them.
    """
    store = HistoryStore.open(
        settings.history_path, settings.history_max_bytes, max_ahead_ms=int(settings.history_max_ahead_s * 1000)
    )
    store.claim(settings.worker_id)
    return store


def _require_memory(
    plan: MemoryPlan, device_is_host: bool, folder: Path, shape: ArenaShape | None, taken_bytes: int
) -> None:
    """Deletes the arenas of workers that do not run any more, if memory is short. Raises RelayError if it stays so."""
    try:
        require_host_memory(plan, device_is_host, taken_bytes)
        is_short = shape is not None and lacks_space(folder, shape.dram_bytes + shape.index_bytes - taken_bytes)
    except RelayError:
        is_short = True
    if is_short:
        delete_abandoned(folder)
        require_host_memory(plan, device_is_host, taken_bytes)


def _connect(producer: Producer, config: WorkerConfig) -> None:
    """Fetches metadata before the first message needs it. Raises RelayError if the broker does not answer."""
    try:
        for topic in (Topic.RESULTS, Topic.DEAD_LETTERS, Topic.WORKERS):
            producer.list_topics(config.kafka.topic(topic), timeout=config.kafka.connect_timeout_s)
    except KafkaException as error:
        raise RelayError(f"Kafka at {config.kafka.bootstrap} no longer answers: {error.args[0]}.") from error


def _measured_latency(engine: Engine, settings: WorkerSettings, folder: Path, *, is_alone: bool) -> LatencyModel:
    """Calibrates or reads a calibration, then warms up. The engine's arena must be empty.

    `is_alone`: no other process uses the device. Raises RelayError if the file in `worker.calibration` is not a
    calibration of this worker.
    """
    if settings.calibration is not None:
        latency = latency_for(engine, settings.calibration)
    elif is_alone:
        calibration = calibrate(engine)
        log.info("device calibrated", device=engine.device.name, **asdict(calibration.coefficients))
        save_calibration(calibration, folder / _CALIBRATION_FILE)
        return model_of(calibration)
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
    """Chooses oneDNN or torch as in a calibration. Without a calibration, this process measures."""
    with contextlib.suppress(RelayError):
        choice = load_calibration(path).machine.uses_onednn
        if choice is not None:
            use_onednn(choice)


def _calibration_of_active(engine: Engine, path: Path) -> LatencyModel:
    try:
        return latency_for(engine, path)
    except RelayError as error:
        log.warning("calibrated while another worker uses the device: times may be too long", cause=str(error))
        return model_of(calibrate(engine))
