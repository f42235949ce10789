"""Settings of a worker process."""

from __future__ import annotations

import enum
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import ByteSize, Field

from relaygr.admission.scenarios import ONLY_DEFAULT, Scenarios
from relaygr.admission.settings import AdmissionSettings
from relaygr.cluster.rights import Role
from relaygr.consumer.settings import ConsumerSettings
from relaygr.kafka.settings import KafkaSettings
from relaygr.runtime.direct_http import EVERY_ADDRESS, http_address
from relaygr.runtime.settings import Section
from relaygr.schemas.limits import MAX_BUDGET_MS, MAX_MESSAGE_BYTES
from relaygr.schemas.topics import Topic
from relaygr.tracing import TracingSettings
from relaygr.worker.cache.policies import DEFAULT_POLICY, PolicyName
from relaygr.worker.kv import DramKvDtype, KvDtype
from relaygr.worker.model.options import ComputeDtype
from relaygr.worker.pool.settings import PoolSettings

_MIB = 1024 * 1024


class WorkerRole(enum.StrEnum):
    """What a worker is for: to own partitions and rank, or to compute prefixes for the owners."""

    OWNER = "owner"
    PRE_INFER = "pre-infer"


class StandbyMemory(enum.StrEnum):
    """When a standby allocates its HBM tier."""

    RESERVED = "reserved"
    AT_TAKEOVER = "at_takeover"


class FollowBehaviours(enum.StrEnum):
    """Whose new behaviours a worker appends to their prefixes before anyone asks."""

    OFF = "off"
    CACHED = "cached"


class WorkerSettings(Section):
    """One worker: identity, device, memory and the order of its work."""

    worker_id: str = Field(
        "worker-00",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$",
        description="group.instance.id: unique, static, zero-padded",
    )
    model: Path = Field(Path("model"), description="checkpoint folder with config.json and model.safetensors")
    ranker_modules: tuple[str, ...] = Field(
        (),
        description="modules, or entry points of relaygr.rankers, whose rankers may run: the folder of a ranker names "
        "its code, which never runs without being listed here",
    )
    device: str | None = Field(
        None, description="cpu, cuda, cuda:1 or npu; none: the machine's accelerator, or cpu without one"
    )
    threads: Annotated[int, Field(ge=1, le=1024, description="CPU threads of the device")] = 1
    calibration: Path | None = Field(None, description="file written by `relaygr calibrate`; none: calibrate at start")

    page_tokens: Annotated[int, Field(ge=1, le=4096, description="tokens of one K,V page")] = 64
    kv_dtype: KvDtype | None = Field(
        None,
        description="element type of stored K,V; none: bfloat16 on an accelerator that has it, float32 on a CPU. int8 "
        "and float8 have a scale for each token and head, scores are approximate, and the error is checked at start",
    )
    kv_max_score_error: Annotated[
        float,
        Field(
            gt=0,
            description="largest score error by kv_dtype int8 or float8, relative to the spread of a user's scores",
        ),
    ] = 0.01
    kv_min_topk_overlap: Annotated[
        float,
        Field(
            gt=0,
            le=1,
            description="smallest part of the 10 best candidates that must stay with kv_dtype int8 or float8",
        ),
    ] = 0.95
    compute_dtype: ComputeDtype | None = Field(
        None,
        description="element type of the model's products; none: as for kv_dtype. int8 is for CPUs with VNNI, and for "
        "the layers' weights, scores are approximate, and the error is checked at start",
    )
    compute_max_score_error: Annotated[
        float,
        Field(gt=0, description="largest score error by compute_dtype int8, relative to the spread of a user's scores"),
    ] = 0.01
    compute_min_topk_overlap: Annotated[
        float,
        Field(gt=0, le=1, description="smallest part of the 10 best candidates that must stay with compute_dtype int8"),
    ] = 0.95
    cuda_graphs: bool = Field(
        False, description="run forwards of sizes seen before from captured CUDA graphs; not measured on hardware yet"
    )
    device_table_bytes: ByteSize = Field(
        ByteSize(4096 * _MIB),
        ge=0,
        description="the largest embedding table in device memory; a larger one stays in host memory, mapped from its "
        "file, and the rows of a batch are copied",
    )
    hbm_bytes: ByteSize = Field(ByteSize(512 * _MIB), ge=_MIB, description="size of the HBM tier")
    dram_bytes: ByteSize = Field(ByteSize(1024 * _MIB), ge=0, description="size of the DRAM tier; 0: none")
    dram_kv_dtype: DramKvDtype = Field(
        DramKvDtype.SAME,
        description="element type of K,V in the DRAM tier; with fewer bits it holds 2 to 4 times as many prefixes, "
        "and scores on reloaded prefixes are approximate; the error is checked at start",
    )
    dram_max_score_error: Annotated[
        float,
        Field(gt=0, description="largest score error by dram_kv_dtype, relative to the spread of a user's scores"),
    ] = 0.01
    dram_min_topk_overlap: Annotated[
        float, Field(gt=0, le=1, description="smallest part of the 10 best candidates that must stay among the 10 best")
    ] = 0.95
    hbm_policy: PolicyName = Field(DEFAULT_POLICY, description="eviction policy of the HBM tier")
    dram_policy: PolicyName = Field(DEFAULT_POLICY, description="eviction policy of the DRAM tier")
    moved_prefix_s: Annotated[
        float,
        Field(
            ge=1,
            description="how long prefixes and histories of a partition are kept after it moved to another worker; "
            "meanwhile only that worker reads deletions of their users",
        ),
    ] = 300.0
    erase_within_s: Annotated[
        float,
        Field(
            ge=1,
            description="time after which no byte of a deleted user is left in the files of the history store: "
            "half of it after a deletion, the worker copies the live histories into new files and deletes the old ones",
        ),
    ] = 900.0
    shared_path: Path | None = Field(
        None,
        description="folder on tmpfs that outlives the worker, with its lock, its finished offsets and the DRAM tier; "
        "none: /dev/shm/relaygr-USER if it exists, and without a standby the DRAM tier ends with the process",
    )
    standby_memory: StandbyMemory = Field(
        StandbyMemory.RESERVED,
        description="when a standby allocates its HBM tier: reserved (before the takeover) or at_takeover",
    )
    reuse_prefixes: bool = Field(
        True, description="false: every ranking request is full inference without chunks, as a baseline"
    )

    history_path: Path = Field(Path("history"), description="folder of the user-history store; each worker has its own")
    history_max_bytes: ByteSize = Field(
        ByteSize(4096 * _MIB), ge=_MIB, description="size limit of the user-history store"
    )
    snapshot_behaviours: Annotated[
        int,
        Field(
            ge=1,
            description="the owner of a partition saves a history on the history topic when this many of its "
            "behaviours are in no snapshot, while the owner has no ranking requests",
        ),
    ] = 1024
    history_max_ahead_s: Annotated[
        float,
        Field(
            ge=1,
            description="a behaviour whose time lies further ahead of the Kafka timestamp of its record gets that "
            "timestamp; in a snapshot, the time of the behaviour before it. The same on all workers",
        ),
    ] = 24 * 3600.0
    snapshot_after_s: Annotated[
        float,
        Field(
            ge=1,
            le=6 * 24 * 3600,
            description="age of a behaviour in no snapshot at which the owner saves the history; the behaviours topic "
            "keeps 7 days",
        ),
    ] = 5 * 24 * 3600.0
    snapshot_bytes_per_s: ByteSize = Field(
        ByteSize(_MIB),
        ge=0,
        description="rate at which a worker saves histories; 0: it saves none, and repeats tombstones only",
    )
    anchor_behaviours: Annotated[
        int,
        Field(
            ge=1,
            description="histories above the model's limit lose their oldest behaviours in steps of this many, "
            "at most a quarter of the limit",
        ),
    ] = 512
    longest_tail: Annotated[
        int,
        Field(
            ge=0,
            description="at most this many behaviours that a cached prefix lacks are ranked with the suffix where that "
            "is cheaper than to append them, and the model's longest suffix has room; 0: every history that grew is "
            "appended, if there is time",
        ),
    ] = 256
    parked_jobs_max: Annotated[
        int,
        Field(
            ge=0,
            description="most requests and jobs that wait for a version of their history; beyond it, they do not wait",
        ),
    ] = 256

    history_wait_ms: Annotated[
        int,
        Field(
            ge=0,
            description="longest time that a request or job waits for a version of its history, from the request's "
            "sending; a request waits for a quarter of its budget at most",
        ),
    ] = 500
    max_deadline_ms: Annotated[
        int,
        Field(
            ge=1,
            le=MAX_BUDGET_MS,
            description="how far ahead of the worker's clock a deadline may lie; "
            "beyond it a request fails as invalid_deadline",
        ),
    ] = 60_000

    chunk_ms: Annotated[
        float,
        Field(
            gt=0,
            description="longest predicted device time of one chunk of a prefix while an urgent ranking request waits "
            "or may arrive; longer if a cut costs more than a fifth of it",
        ),
    ] = 5.0
    longest_chunk_ms: Annotated[
        float, Field(gt=0, description="longest predicted device time of any chunk; chunk_ms where that is longer")
    ] = 50.0
    max_chunk_tokens: Annotated[int, Field(ge=1, description="most tokens of one chunk, which bounds its memory")] = (
        2048
    )
    max_batch_requests: Annotated[int, Field(ge=1, le=1024, description="most ranking requests in one forward")] = 32
    max_batch_rows: Annotated[
        int,
        Field(
            ge=1,
            description="most suffix tokens and candidates in one forward, which bounds its memory; "
            "a request alone may have more",
        ),
    ] = 4096
    mix_chunks: bool | None = Field(
        None, description="run a pre-infer chunk and ranking requests in one forward; none: on accelerators only"
    )
    warm_up_users: Annotated[
        int,
        Field(
            ge=0,
            le=1_000_000,
            description="most users whose prefixes are computed on an idle device, or fetched from the pool, after a "
            "start, an assignment or a new model, those with the newest behaviours first; 0: no warm-up",
        ),
    ] = 0
    warm_up_s: Annotated[float, Field(gt=0, description="time after which a warm-up ends")] = 60.0
    warm_up_share: Annotated[
        float,
        Field(gt=0, le=1, description="largest share of the device time that warm-up and follow_behaviours take"),
    ] = 0.5
    follow_behaviours: FollowBehaviours = Field(
        FollowBehaviours.OFF,
        description="cached: an idle device appends new behaviours to prefixes in HBM before anyone asks for them; "
        "off: a prefix is brought up to date when its user is back",
    )
    ranking_queue_max: Annotated[
        int, Field(ge=1, description="unanswered ranking requests at which the ranking partitions pause")
    ] = 2048
    ranking_queue_bytes: ByteSize = Field(
        ByteSize(64 * _MIB),
        ge=_MIB,
        description="most memory of unanswered ranking requests and their histories; at three quarters of it the "
        "ranking partitions pause, beyond it requests fail as overloaded",
    )
    preinfer_queue_max: Annotated[
        int, Field(ge=1, description="most prefixes that wait for pre-infer; beyond it, jobs are shed")
    ] = 1024
    preinfer_queue_bytes: ByteSize = Field(
        ByteSize(64 * _MIB),
        ge=_MIB,
        description="most memory of pre-infer jobs and their histories; beyond it, jobs are shed",
    )
    reply_margin_ms: Annotated[float, Field(ge=0, description="time that a result needs to reach the gateway")] = 2.0
    grace_ms: Annotated[
        float,
        Field(
            ge=0,
            le=60_000,
            description="time after its deadline for which an answer on the whole history is still wanted: a request "
            "is truncated, refused or expired only if even that time does not suffice",
        ),
    ] = 0.0
    max_clock_skew_ms: Annotated[
        int, Field(ge=0, description="time past its deadline after which a request counts as expired")
    ] = 5

    pre_infer_slots: Annotated[
        int,
        Field(
            ge=1,
            le=64,
            description="jobs that a worker of the role pre-infer takes at a time: one is computed while the prefixes "
            "of others are written to the pool",
        ),
    ] = 2
    divert: bool = Field(
        False,
        description="pass on ranking requests that this worker has no time for to a worker that has, and take those "
        "of other workers; needs the topic `ranking-overflow` and the rights of the role worker-divert",
    )
    divert_share: Annotated[
        float, Field(gt=0, le=1, description="largest share of the received ranking requests that is diverted")
    ] = 0.75
    divert_bytes: ByteSize = Field(
        ByteSize(512 * 1024),
        ge=0,
        le=MAX_MESSAGE_BYTES - 64 * 1024,
        description="largest diverted request; if the history does not fit, only its newest part is attached",
    )

    reload_spread_s: Annotated[
        float,
        Field(
            ge=0,
            le=3600,
            description="time over which the workers spread a reload of the model; each waits a part of it, by its "
            "worker_id; 0: reload at once",
        ),
    ] = 0.0
    model_poll_s: Annotated[
        float,
        Field(
            ge=0,
            le=3600,
            description="how often the worker looks whether `worker.model` has other weights, and then loads them as "
            "after SIGHUP; 0: it never looks",
        ),
    ] = 0.0
    status_interval_ms: Annotated[int, Field(ge=50, description="time between two status messages")] = 500
    watchdog_s: Annotated[
        float, Field(ge=1, description="time without progress on the device after which the worker exits")
    ] = 10.0
    orphan_s: Annotated[
        float,
        Field(
            ge=0,
            description="how long a process of a hot standby's pair goes on after its supervisor died, until a new "
            "supervisor of the same worker_id adopts it; 0: it stops at once",
        ),
    ] = 60.0
    drain_s: Annotated[float, Field(ge=0, description="time to finish received messages after SIGTERM")] = 5.0
    http_host: str = Field("127.0.0.1", description="address that the HTTP server of metrics and probes listens on")
    http_port: Annotated[
        int, Field(ge=0, le=65535, description="port of /metrics, /healthz and /readyz; 0: any free port")
    ] = 0
    metrics_url: Annotated[
        str | None,
        Field(
            pattern=r"^https?://[!-~]{1,240}$",
            description="address of /metrics in the worker's status, for `relaygr ui`; none: http_host and the port",
        ),
    ] = None
    pool: PoolSettings = PoolSettings()

    def metrics_url_at(self, port: int) -> str:
        """The address of the page `/metrics` that is served on `port`."""
        host = socket.gethostname() if self.http_host in EVERY_ADDRESS else self.http_host
        return self.metrics_url or f"{http_address(host, port)}/metrics"

    def mixes_chunks(self, on_cpu: bool) -> bool:
        """Whether pre-infer chunks and ranking requests share forwards on this kind of device."""
        return not on_cpu if self.mix_chunks is None else self.mix_chunks


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """The sections of the settings that one worker process reads."""

    kafka: KafkaSettings
    worker: WorkerSettings
    admission: AdmissionSettings
    consumer: ConsumerSettings
    tracing: TracingSettings = field(default_factory=TracingSettings)
    scenarios: Scenarios = field(default_factory=lambda: ONLY_DEFAULT)
    """Those that the worker serves."""
    role: WorkerRole = WorkerRole.OWNER

    @property
    def is_pre_infer(self) -> bool:
        return self.role is WorkerRole.PRE_INFER

    @property
    def topics(self) -> tuple[Topic, ...]:
        """The topics that the worker reads as a member of a group."""
        return (Topic.PREINFER_POOL,) if self.is_pre_infer else self.kafka.worker_topics

    @property
    def group(self) -> str:
        """The group of its readers of these topics."""
        return self.kafka.pool_group if self.is_pre_infer else self.kafka.workers_group

    @property
    def rights(self) -> Role:
        """The rights that the worker needs."""
        if self.is_pre_infer:
            return Role.WORKER_PRE_INFER
        return Role.WORKER_DIVERT if self.worker.divert else Role.WORKER

    @property
    def client_id(self) -> str:
        """The name of this worker's clients in the broker's logs."""
        return f"relaygr-{self.worker.worker_id}"
