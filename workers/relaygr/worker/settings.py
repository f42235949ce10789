"""Settings of a worker process."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import ByteSize, Field

from relaygr.admission.settings import AdmissionSettings
from relaygr.consumer.settings import ConsumerSettings
from relaygr.kafka.settings import KafkaSettings
from relaygr.runtime.settings import Section
from relaygr.worker.cache.policies import PolicyName
from relaygr.worker.kv import DramKvDtype, KvDtype
from relaygr.worker.model.options import ComputeDtype

_MIB = 1024 * 1024


class StandbyMemory(enum.StrEnum):
    """When a standby takes its device memory."""

    RESERVED = "reserved"
    AT_TAKEOVER = "at_takeover"


class WorkerSettings(Section):
    """One worker: its identity, device, memory and the order of its work."""

    worker_id: str = Field(
        "worker-00",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$",
        description="group.instance.id: unique, static, zero-padded",
    )
    model: Path = Field(Path("model"), description="checkpoint folder: config.json and model.safetensors")
    device: str | None = Field(
        None, description="cpu, cuda, cuda:1, npu; none: the accelerator that is there, else cpu"
    )
    threads: Annotated[int, Field(ge=1, le=1024, description="CPU threads of the device")] = 1
    calibration: Path | None = Field(None, description="file of `relaygr calibrate`; none: calibrate at start")

    page_tokens: Annotated[int, Field(ge=1, le=4096, description="tokens of one K,V page")] = 64
    kv_dtype: KvDtype = Field(KvDtype.FLOAT32, description="element type of stored K,V")
    compute_dtype: ComputeDtype = Field(ComputeDtype.FLOAT32, description="element type of the model's products")
    cuda_graphs: bool = Field(
        False, description="forwards of sizes seen before run from captured graphs; not measured on hardware yet"
    )
    hbm_bytes: ByteSize = Field(ByteSize(512 * _MIB), ge=_MIB, description="size of the HBM tier")
    dram_bytes: ByteSize = Field(ByteSize(1024 * _MIB), ge=0, description="size of the DRAM tier; 0: none")
    dram_kv_dtype: DramKvDtype = Field(
        DramKvDtype.SAME,
        description="element type of K,V in the DRAM tier: in fewer bits it holds 2 to 4 times as many prefixes, and "
        "scores on reloaded ones are approximate; checked at start",
    )
    dram_max_score_error: Annotated[
        float, Field(gt=0, description="most that this may change a score by, as a part of the largest")
    ] = 0.01
    dram_min_topk_overlap: Annotated[
        float, Field(gt=0, le=1, description="least part of the 10 best candidates that must stay among them")
    ] = 0.95
    hbm_policy: PolicyName = Field(PolicyName.LRU, description="which prefixes leave the HBM tier first")
    dram_policy: PolicyName = Field(PolicyName.LRU, description="which prefixes leave the DRAM tier first")
    prefix_ttl_s: Annotated[
        float, Field(gt=0, description="policy ttl: how long a prefix stays that nobody uses, seconds")
    ] = 600.0
    shared_path: Path | None = Field(
        None,
        description="folder, on tmpfs, of what outlives a worker: lock, finished offsets and the DRAM tier; "
        "none: /dev/shm/relaygr-USER where there is one, and without a standby the DRAM tier ends with the process",
    )
    standby_memory: StandbyMemory = Field(
        StandbyMemory.RESERVED, description="the HBM tier of a standby: taken ahead, or at_takeover"
    )
    cache_trace: Path | None = Field(
        None, description="file to record cache operations in, for `relaygr cache replay`; none: do not record"
    )
    cache_trace_bytes: ByteSize = Field(
        ByteSize(256 * _MIB), ge=_MIB, description="size limit of that file; recording then ends"
    )
    reuse_prefixes: bool = Field(True, description="false: every ranking request is full inference (the baseline)")

    history_path: Path = Field(Path("history"), description="folder of the user-history store")
    history_max_bytes: ByteSize = Field(ByteSize(4096 * _MIB), ge=_MIB, description="size limit of that store")
    anchor_behaviours: Annotated[
        int,
        Field(
            ge=1,
            description="longer histories lose their oldest in such steps, a quarter of the model's limit at most",
        ),
    ] = 512
    parked_jobs_max: Annotated[int, Field(ge=0, description="work that waits for its history version")] = 256

    chunk_ms: Annotated[float, Field(gt=0, description="longest uninterrupted piece of pre-infer")] = 5.0
    max_chunk_tokens: Annotated[int, Field(ge=1, description="most tokens of such a piece: bounds its memory")] = 2048
    max_batch_requests: Annotated[int, Field(ge=1, le=1024, description="ranking requests in one forward")] = 32
    max_batch_rows: Annotated[
        int, Field(ge=1, description="their suffixes and candidates together, beyond one request: bounds its memory")
    ] = 4096
    mix_chunks: bool | None = Field(
        None, description="pre-infer chunks beside ranking requests in one forward; none: on accelerators only"
    )
    ranking_queue_max: Annotated[int, Field(ge=1, description="beyond it, partitions pause")] = 2048
    ranking_queue_bytes: ByteSize = Field(
        ByteSize(64 * _MIB), ge=_MIB, description="likewise, by what the requests and their histories take"
    )
    preinfer_queue_max: Annotated[int, Field(ge=1, description="beyond it, jobs are shed")] = 1024
    reply_margin_ms: Annotated[float, Field(ge=0, description="time left for the answer's way back")] = 2.0
    max_clock_skew_ms: Annotated[int, Field(ge=0, description="grace before a request counts as expired")] = 5

    status_interval_ms: Annotated[int, Field(ge=50)] = 500
    watchdog_s: Annotated[float, Field(ge=1, description="exit when the device does not move for so long")] = 10.0
    drain_s: Annotated[float, Field(ge=0, description="on SIGTERM, time to finish what was received")] = 5.0
    http_host: str = "127.0.0.1"
    http_port: Annotated[int, Field(ge=0, le=65535, description="/metrics, /healthz, /readyz; 0: any free port")] = 0

    def mixes_chunks(self, on_cpu: bool) -> bool:
        """Whether pre-infer chunks run beside ranking requests on such a device."""
        return not on_cpu if self.mix_chunks is None else self.mix_chunks


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """The sections of the settings that one worker process reads."""

    kafka: KafkaSettings
    worker: WorkerSettings
    admission: AdmissionSettings
    consumer: ConsumerSettings

    @property
    def client_id(self) -> str:
        """The name of this worker's clients in the broker's logs."""
        return f"relaygr-{self.worker.worker_id}"
