"""A store of the pool that workers of two versions share, one after the other and with the same settings."""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path

import pytest
from pydantic import ByteSize

from relaygr.kafka.settings import KafkaSettings
from relaygr.processes import CommandProcess
from relaygr.worker.model.checkpoint import random_checkpoint
from relaygr.worker.pool.settings import PoolSettings
from relaygr.worker.settings import WorkerSettings
from tests.pipeline.test_pool import LENGTH, SLOW_DEVICE, assert_equal, counted, ranked_on_all, written
from tests.waiting import until
from tests.wheel.upgrade_world import Version
from tests.worlds.pool import mooncake
from tests.worlds.relay import Relay, history_of, model_config, save_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.parametrize("broker", ["embedded"], indirect=True),
]


SECRET = b"0123456789abcdef"
OBJECTS = LENGTH // WorkerSettings.model_fields["page_tokens"].default
"""Of a user: a page of this wide model is one."""


def test_objects_of_the_other_version_are_never_misread_and_deleted_with_their_user(
    kafka_settings: KafkaSettings, tmp_path: Path, versions: tuple[Version, Version]
) -> None:
    first, then = versions
    users = [history_of(f"user-{number}", LENGTH, number) for number in range(3)]
    # So wide that computing takes much longer than fetching on a busy machine, too: what does not pay is not written.
    config = model_config().model_copy(
        update={"embedding_dim": 256, "attention_dim": 128, "hidden_dim": 128, "num_layers": 4}
    )
    model = save_model(tmp_path / "model", config, random_checkpoint(config, 7).tensors, SLOW_DEVICE)
    secret = tmp_path / "secret"
    secret.write_bytes(SECRET)
    with mooncake(tmp_path / "mooncake", forgets_s=300) as stores:
        # The form of the address that both versions read.
        pool = PoolSettings(address=f"127.0.0.1:{stores.port}", secret_file=secret, visits=1)
        relay = Relay(
            kafka_settings,
            tmp_path / "relay",
            model,
            pool=pool,
            hbm_bytes=ByteSize(32 << 20),
            dram_bytes=ByteSize(64 << 20),
        )
        with relay, relay.client() as client:
            worker = started(relay, first, "worker-00")
            scores = written(client, users, worker, OBJECTS)
            assert relay.stop(worker) == 0
            worker = started(relay, then, "worker-01")
            for user in users:
                assert_equal(ranked_on_all(client, user), scores[user.user_id])
            assert counted(worker, "fetches_total", outcome="torn") == 0
            assert counted(worker, "fetches_total", outcome="unreadable") == 0
            client.tombstone(users[0].user_id)
            until(lambda: counted(worker, "objects_removed_total", reason="deletion") > 0, "deleted")
            assert relay.stop(worker) == 0
        assert [stores.open().forget([part_of(user.user_id)]) > 0 for user in users] == [False, True, True]


def part_of(user_id: str) -> str:
    """The part of an object's key that names the user."""
    return blake2b(user_id.encode(), key=blake2b(SECRET).digest(), digest_size=16).hexdigest()


def started(relay: Relay, version: Version, worker_id: str) -> CommandProcess:
    """A worker of this version that is ready and has the pool."""
    with version.starts():
        worker = relay.start_worker(worker_id)
    relay.await_ready(worker)
    until(lambda: counted(worker, "away") == 0, "the pool is there")
    return worker
