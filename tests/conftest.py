"""Fixtures for tests that need a broker.

`broker` runs a test on librdkafka's embedded cluster and on a real Apache Kafka (marked `kafka`); each
is started once. `kafka_settings` gives a test topics and groups of its own on it. A file of slow tests for which the
kind of broker makes no difference overrides `broker` with `any_broker`, and its tests run once.

The real one is `RELAYGR_TEST_BOOTSTRAP` where that is set, else one started from `KAFKA_HOME`. Where
there is none, its tests are skipped, or fail if a broker is promised (`tests/promised.py`).

Tests marked `kafka`, `outage`, `browser`, `container` or `soak` are marked `slow` here.

A test has one try: a test that passes only at its second try hides a race.

Every test begins with the logging of a process that configured none, and without the caller's settings. A test that
leaves a thread or a child process behind fails.

A run of the whole suite uses three processes (pytest-xdist), the quick lane two, a run of chosen files one. The tests
of a file stay in one process, and the files that last longest come first. At most two processes run whole relays, as
long as there are other files. The processes share one real broker; each has an embedded cluster of its own.

Examples of property tests may take as long as they like: no test asserts how long something took. The quick lane
(`-m "not slow"`) tries 25 of them instead of hypothesis's 100, where a test names no number of its own.
"""

from __future__ import annotations

import gc
import logging
import os
import pickle
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import structlog
from hypothesis import settings

from relaygr.devbroker import BrokerChoice, LocalBroker, available_brokers, local_broker
from relaygr.kafka.settings import KafkaSettings
from relaygr.runtime.errors import RelayError
from tests.leftovers import Leftovers
from tests.promised import promised, unavailable
from tests.waiting import PATIENCE_S

TEST_PARTITIONS = 12
ROOT = Path(__file__).parents[1]
WITH_RELAYS = ("tests/pipeline/", "tests/benchmarks/", "tests/cli/test_first_hour_page.py", "tests/wheel/test_upgrade")
RELAYS = 2
"""The most files with whole relays that run at once: more would make each other late."""
LONGEST = (
    "tests/wheel/test_upgrade.py",
    "tests/pipeline/test_prepool.py",
    "tests/pipeline/test_standby.py",
    "tests/pipeline/test_demo.py",
    "tests/pipeline/test_pool.py",
    "tests/pipeline/test_other_rankers.py",
    "tests/pipeline/test_affinity.py",
    "tests/pipeline/test_brokers.py",
    "tests/wheel/test_upgrade_pool.py",
    "tests/pipeline/test_older_disk.py",
    "tests/training/test_runs.py",
    "tests/pipeline/test_divert.py",
    "tests/training/test_collect.py",
    "tests/pipeline/test_demo_data.py",
    "tests/pipeline/test_demo_pool.py",
    "tests/workers/test_pool_faults.py",
    "tests/benchmarks/test_gpu.py",
    "tests/workers/test_history_follower.py",
    "tests/pipeline/test_warm_restart.py",
    "tests/streams/test_trigger_app.py",
    "tests/cli/test_model_compare.py",
    "tests/pipeline/test_rights.py",
    "tests/streams/test_lag_coordinator.py",
    "tests/benchmarks/test_events.py",
    "tests/pipeline/test_relay.py",
    "tests/cli/test_first_hour_page.py",
    "tests/streams/test_rotation.py",
    "tests/cli/test_ranker_commands.py",
    "tests/workers/test_supervisor.py",
    "tests/cli/test_simulate.py",
)
"""Files that take a minute or more, the longest first: none of them is to be the last."""
QUICK = "not slow"
SLOW_LANES = ("kafka", "outage", "browser", "container", "soak")
OPEN = pytest.StashKey[ExitStack]()
SHARED_BROKER = pytest.StashKey[bytes]()

settings.register_profile("all", deadline=None)
settings.register_profile("quick", deadline=None, max_examples=25)

# Tests start hundreds of Python processes: each would compile the project again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A test's broker lives for minutes: Java's second compiler and its parallel collector cost more than they save.
os.environ.setdefault("KAFKA_OPTS", "-XX:TieredStopAtLevel=1")
os.environ.setdefault("KAFKA_JVM_PERFORMANCE_OPTS", "-XX:+UseSerialGC -Djava.awt.headless=true")

# A shell lets what it starts in the background ignore an interrupt, and the processes of the tests would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

for _name in [name for name in os.environ if name.startswith("RELAYGR_") and not name.startswith("RELAYGR_TEST_")]:
    del os.environ[_name]


if "PYTEST_XDIST_WORKER" in os.environ:
    # Before torch is imported: the workers share the cores already.
    os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    if config.args_source is not pytest.Config.ArgsSource.TESTPATHS:
        return 0  # Chosen tests: in pytest's own process.
    cores = min(2, os.cpu_count() or 1)
    # Slow tests wait for processes and brokers a good part of their time. With two more than cores, tests were late.
    return cores + (0 if config.option.markexpr == QUICK else 1)


def pytest_configure(config: pytest.Config) -> None:
    config.stash[OPEN] = ExitStack()
    settings.load_profile("quick" if config.option.markexpr == QUICK else "all")
    try:
        promised()
    except ValueError as error:
        raise pytest.UsageError(str(error)) from error


def pytest_unconfigure(config: pytest.Config) -> None:
    if OPEN in config.stash:
        config.stash[OPEN].close()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Before a process of pytest-xdist starts: gives it the real broker, which the first call starts."""
    config: pytest.Config = node.config
    if config.option.markexpr == QUICK:
        return
    if SHARED_BROKER not in config.stash:
        try:
            broker = config.stash[OPEN].enter_context(started_broker())
        except RelayError:
            return  # The tests that need a broker say so.
        # A broker that others use is not restarted.
        config.stash[SHARED_BROKER] = pickle.dumps(replace(broker, restart=None))
    node.workerinput["broker"] = config.stash[SHARED_BROKER]


@pytest.hookimpl(tryfirst=True)  # Before `-m` chooses.
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.pluginmanager.has_plugin("xdist"):
        items.sort(key=lambda item: _place(file_of(item.nodeid)))
    for item in items:
        if any(item.get_closest_marker(lane) for lane in SLOW_LANES):
            item.add_marker("slow")


def pytest_collection_finish() -> None:
    """The garbage collector need not look again and again at torch, hypothesis and thousands of test items."""
    gc.collect()
    gc.freeze()


def file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def has_relays(file: str) -> bool:
    return file.startswith(WITH_RELAYS)


def _place(file: str) -> int:
    """The longest files come first, then the other ones with relays."""
    return LONGEST.index(file) if file in LONGEST else len(LONGEST) + (not has_relays(file))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """One process runs a file from its first test to its last, unless `--dist` asks for another way."""
    if config.option.dist != "loadscope":
        return None
    from xdist.scheduler import LoadScopeScheduling  # A part of the dev extra, and only needed with `-n`.

    class OneProcessAFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return file_of(nodeid)

        def _assign_work_unit(self, node: Any) -> None:
            others = [files for other, files in self.assigned_work.items() if other is not node]
            busy = [
                any(has_relays(file) and not all(tests.values()) for file, tests in files.items()) for files in others
            ]
            if sum(busy) >= RELAYS:
                other = next((file for file in self.workqueue if not has_relays(file)), None)
                if other is not None:
                    self.workqueue.move_to_end(other, last=False)
            super()._assign_work_unit(node)

    return OneProcessAFile(config, log)


class _StandardError:
    """A structlog logger that looks up `sys.stderr` at each line.

    structlog's own keeps the stream that it found first. Where that was a test's captured output, it is closed by
    the time that a later test logs.
    """

    def msg(self, message: str) -> None:
        sys.stderr.write(f"{message}\n")

    debug = info = warning = error = critical = exception = fatal = log = msg


RENDERER = structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
"""structlog's default prints every local variable below a traceback, which takes seconds."""


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """What fixtures of a module or of the whole run started before is theirs to end."""
    leftovers = Leftovers()
    yield
    assert leftovers.found_after() == []


@pytest.fixture(autouse=True)
def numbers_next_to_zero() -> None:
    """An engine that an earlier test has loaded lets this thread take numbers next to zero for zero, and hypothesis
    then refuses to draw numbers.
    """
    if "torch" in sys.modules:
        sys.modules["torch"].set_flush_denormal(False)


@pytest.fixture(autouse=True)
def own_logging(nothing_left_behind: None) -> Iterator[None]:
    """What a test configures of `logging` and structlog ends with it."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    structlog.reset_defaults()
    processors = [*structlog.get_config()["processors"][:-1], RENDERER]
    structlog.configure(processors=processors, logger_factory=lambda *_: _StandardError())
    yield
    for handler in root.handlers[:]:
        if handler not in handlers:
            root.removeHandler(handler)
            handler.close()
    root.setLevel(level)


@pytest.fixture(scope="session")
def embedded_broker() -> Iterator[LocalBroker]:
    """librdkafka's own cluster."""
    with local_broker(BrokerChoice.EMBEDDED) as broker:
        yield broker


def started_broker() -> AbstractContextManager[LocalBroker]:
    """A real Apache Kafka. Raises RelayError if there is none."""
    return local_broker(os.environ.get("RELAYGR_TEST_BOOTSTRAP") or BrokerChoice.KAFKA)


@pytest.fixture(scope="session")
def real_broker(request: pytest.FixtureRequest) -> Iterator[LocalBroker]:
    """A real Apache Kafka; tests that take it directly carry the `kafka` marker themselves."""
    shared = getattr(request.config, "workerinput", {}).get("broker")
    if shared is not None:
        yield pickle.loads(shared)
        return
    with ExitStack() as stack:
        try:
            broker = stack.enter_context(started_broker())
        except RelayError as error:
            unavailable("broker", f"no real Kafka here: {error}")
        yield broker


@pytest.fixture(scope="session", params=["embedded", pytest.param("kafka", marks=pytest.mark.kafka)])
def broker(request: pytest.FixtureRequest) -> LocalBroker:
    """Each broker in turn."""
    name = "embedded_broker" if request.param == "embedded" else "real_broker"
    chosen: LocalBroker = request.getfixturevalue(name)
    return chosen


@pytest.fixture(scope="session")
def any_broker(request: pytest.FixtureRequest) -> LocalBroker:
    """A real Kafka, or the embedded cluster where there is none and none is promised."""
    has_real = os.environ.get("RELAYGR_TEST_BOOTSTRAP") or available_brokers().kafka_home or "broker" in promised()
    chosen: LocalBroker = request.getfixturevalue("real_broker" if has_real else "embedded_broker")
    return chosen


@pytest.fixture
def kafka_settings(broker: LocalBroker) -> Iterator[KafkaSettings]:
    """Settings for `broker` with a prefix of the test's own, its topics created and deleted after."""
    prefix = f"test-{uuid.uuid4().hex[:12]}"
    settings = broker.settings(
        KafkaSettings(
            topic_prefix=prefix,
            group_prefix=prefix,
            partitions=TEST_PARTITIONS,
            dead_letter_bodies=True,
            connect_timeout_s=PATIENCE_S,
        )
    )
    broker.create_topics(settings)
    yield settings
    broker.delete_topics(settings)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", place], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"this user may not mount a file system: {mounted.stderr.decode().strip()}")
    yield place
    subprocess.run(["umount", "--lazy", place], check=True)
