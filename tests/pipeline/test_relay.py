"""One worker and a trigger, as processes: each way that a request can be served, and bad input."""

from __future__ import annotations

import http.client
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path as FilePath

import numpy as np
import pytest

from relaygr.client import Ended, RankOutcome, RelayClient
from relaygr.devbroker import BrokerChoice, LocalBroker
from relaygr.devbroker.local import free_ports
from relaygr.schemas import codec
from relaygr.schemas.ended import Reason
from relaygr.schemas.limits import MAX_MESSAGE_BYTES
from relaygr.schemas.messages import BehaviourEvent, Path, PrefixSource, RankingResult, StaleCause
from relaygr.schemas.partitioner import partition_for
from relaygr.schemas.topics import CATALOGUE, Topic
from tests.leftovers import owned_by_a_fixture
from tests.promised import program, unavailable
from tests.waiting import until
from tests.worlds.relay import (
    MAX_CANDIDATES,
    PARTITIONS,
    DeadLetters,
    RawGateway,
    Relay,
    candidates_of,
    history_of,
    jobs_done,
    new_user,
    reading,
)

pytestmark = pytest.mark.slow

EXAMPLES = FilePath(__file__).parents[2] / "docs" / "examples"
GO_LIBRARIES = FilePath("/usr/share/gocode")
ATTEMPTS = 10
BUDGET_MS = 5_000
BURST_BUDGET_MS = 30_000
"""A worker refuses what it cannot answer in time, and a burst is to be answered on a slow machine, too."""
TOLERANCE = 2e-5


class Stack:
    """The worker, trigger and clients that the tests of this module share."""

    def __init__(self, relay: Relay) -> None:
        self.relay = relay
        self.worker = relay.start_worker("worker-00")
        self.trigger = relay.start_trigger()
        relay.await_ready(self.worker, self.trigger)
        self.client: RelayClient = relay.client()
        self.client.start()
        self.raw = RawGateway(relay.kafka)
        self.letters = DeadLetters(relay.kafka)

    def close(self) -> None:
        self.client.close()
        self.raw.close()
        self.letters.close()

    def pre_infer(self, user_id: str, length: int, seed: int = 0, *outcomes: str) -> str:
        """Begins an impression. Returns its request id when its pre-infer job has ended with one of `outcomes`, by
        default "computed".
        """
        outcomes = outcomes or ("computed",)
        before = jobs_done(self.worker)
        history = history_of(user_id, length, seed)
        self.client.publish_history(history)

        def ended() -> bool:
            done = jobs_done(self.worker)
            return any(done.get(outcome, 0) > before.get(outcome, 0) for outcome in outcomes)

        # While the lease of a job may hold, the trigger sends no second one of that version, and on a busy machine it
        # may decide too late: the user comes again.
        for _ in range(60):
            held = self.held_back()
            event = self.client.publish_retrieval(
                user_id,
                ranking_budget_ms=BUDGET_MS,
                expected_ranking_in_ms=1_000,
                expected_candidates=20,
                expected_suffix=4,
                history_version=history.version(),
            )
            try:
                until(
                    lambda held=held: ended() or self.held_back() > held,
                    f"a job {' or '.join(outcomes)}",
                )
            except AssertionError as error:
                raise AssertionError(f"{error}: {jobs_done(self.worker)}, {self.decisions()}") from error
            if ended():
                return event.request_id
            time.sleep(0.5)
        raise AssertionError(f"all jobs were held back: {self.decisions()}")

    def held_back(self) -> float:
        decisions = self.decisions()
        return decisions.get("under_way", 0) + decisions.get("infeasible", 0)

    def decisions(self) -> dict[str, float]:
        return reading(self.trigger).by_label("relaygr_trigger_decisions_total", "reason")

    def rank(self, user_id: str, length: int | None = None, seed: int = 0, request_id: str | None = None, **fields):
        version = None if length is None else history_of(user_id, length, seed).version()
        suffix = history_of(user_id, 4, seed=77).behaviours
        fields = {"suffix": suffix, "history_version": version, "request_id": request_id, **fields}
        return self.client.rank(user_id, fields.pop("candidates", candidates_of()), budget_ms=BUDGET_MS, **fields)

    def ranked(self, *arguments, **fields) -> RankingResult:
        outcome = self.rank(*arguments, **fields)
        assert outcome.status is Ended.RANKED, outcome
        assert outcome.result is not None
        return outcome.result

    def full(self, length: int, seed: int = 0) -> RankingResult:
        """The result for the same history of a new user, whose prefix is not cached."""
        user = new_user("full")
        self.client.publish_history(history_of(user, length, seed))
        result = self.ranked(user, length, seed)
        assert result.path is Path.FULL and result.tokens_cached == 0
        return result


@pytest.fixture(scope="module")
def broker(any_broker: LocalBroker) -> LocalBroker:
    """The embedded cluster serves the demo, the wheel and many files beside this one."""
    return any_broker


@pytest.fixture(scope="module")
def stack(relay: Relay) -> Iterator[Stack]:
    stack = Stack(relay)
    with owned_by_a_fixture(relay.process_ids):
        yield stack
    stack.close()


def assert_same_scores(one: RankingResult, other: RankingResult) -> None:
    assert one.scores is not None and other.scores is not None
    assert np.ptp(other.scores) > 0
    assert np.abs(one.scores - other.scores).max() <= TOLERANCE * np.abs(other.scores).max()


# -- the paths of a request ----------------------------------------------------------------------


def test_an_at_risk_event_makes_its_ranking_request_hit_hbm_with_the_scores_of_full_inference(stack):
    user = new_user()
    request_id = stack.pre_infer(user, 300, seed=1)
    result = stack.ranked(user, 300, seed=1, request_id=request_id)
    assert result.path is Path.HBM
    assert result.prefix_source is PrefixSource.COMPUTED
    assert result.tokens_cached == result.prefix_tokens == 301  # One token is the contextual feature.
    assert result.history_version == history_of(user, 300, seed=1).version()
    assert not result.history_stale
    assert_same_scores(result, stack.full(300, seed=1))


def test_a_request_without_any_known_history_is_ranked_on_the_full_path(stack):
    result = stack.ranked(new_user("stranger"))
    assert result.path is Path.FULL
    assert result.history_version is None
    assert result.tokens_cached == 0
    assert result.num_tasks == 2 and result.scores.size == 2 * 20


def test_a_history_without_behaviours_is_ranked_and_pre_inferred_like_any_other(stack):
    user = new_user("empty")
    stack.client.publish_history(history_of(user, 0, seed=3, number=5))
    version = history_of(user, 0, seed=3, number=5).version()
    first = stack.ranked(user, history_version=version)
    second = stack.ranked(user, history_version=version)
    assert first.history_version == version
    assert_same_scores(second, first)


def test_a_request_carries_its_history_itself(stack):
    user = new_user("inline")
    result = stack.ranked(user, history=history_of(user, 200, seed=4))
    assert result.prefix_tokens == 201
    assert_same_scores(result, stack.full(200, seed=4))


def test_a_grown_history_appends_to_what_is_cached(stack):
    user = new_user()
    request_id = stack.pre_infer(user, 256, seed=5)
    stack.ranked(user, 256, seed=5, request_id=request_id)
    request_id = stack.pre_infer(user, 300, seed=5)
    assert reading(stack.worker).total("relaygr_cache_appends_total") >= 1
    appended = stack.ranked(user, 300, seed=5, request_id=request_id)
    assert appended.path is Path.HBM and appended.prefix_tokens == 301
    grown = history_of(user, 320, seed=5)
    stack.client.publish_history(grown)
    result = stack.ranked(user, 320, seed=5)
    assert result.path is Path.HBM
    assert 0 < result.tokens_cached < result.prefix_tokens == 321
    assert_same_scores(appended, stack.full(300, seed=5))
    assert_same_scores(result, stack.full(320, seed=5))


def test_behaviours_that_were_added_one_by_one_are_ranked_like_a_whole_history(stack):
    user = new_user("acting")
    first, grown = history_of(user, 256, seed=10), history_of(user, 300, seed=10)
    stack.client.publish_history(first)
    assert stack.ranked(user, history_at_least=256).tokens_cached == 0
    for position in range(256, 300):
        new = grown.behaviours[position : position + 1]
        stack.client.publish_behaviours(BehaviourEvent(user, new, position))
        if position % 7 == 0:  # A producer's duplicate.
            stack.client.publish_behaviours(BehaviourEvent(user, new, position))
    result = stack.ranked(user, history_at_least=300)
    assert (result.path, result.prefix_tokens, result.history_stale) == (Path.HBM, 301, False)
    assert 0 < result.tokens_cached < 301, "only the new part was computed"
    assert result.history_version.digest == grown.version().digest
    assert_same_scores(result, stack.full(300, seed=10))
    earlier = stack.ranked(user, history_exactly=270)
    assert (earlier.prefix_tokens, earlier.history_version.length) == (271, 270)
    gap = history_of(user, 310, seed=10).behaviours[305:306]
    stack.client.publish_behaviours(BehaviourEvent(user, gap, 305))
    behind = stack.ranked(user, history_at_least=301)
    assert (behind.history_stale, behind.history_version.length) == (True, 301)
    stack.client.publish_history(history_of(user, 310, seed=10))
    whole = stack.ranked(user, history_at_least=310)
    assert (whole.history_stale, whole.prefix_tokens) == (False, 311)


def stale(stack: Stack) -> dict[str, float]:
    return reading(stack.worker).by_label("relaygr_worker_history_stale_total", "cause")


def test_after_a_lost_behaviour_nothing_waits_until_a_snapshot_mends_the_gap(stack):
    """As an outage leaves it: each request of such a user took its whole budget, and its job ended without a prefix."""
    user, before = new_user("lost"), stale(stack)
    stack.client.publish_history(history_of(user, 130, seed=31))
    assert stack.ranked(user, 130, seed=31).prefix_tokens == 131
    lost = history_of(user, 140, seed=31)
    stack.client.publish_behaviours(BehaviourEvent(user, lost.behaviours[131:140], 131))

    def has_gap() -> bool:
        return stack.ranked(user).history_stale_cause is StaleCause.GAP

    until(has_gap, "the behaviours after the lost one are stored")
    computed = jobs_done(stack.worker).get("computed", 0) + jobs_done(stack.worker).get("already_cached", 0)
    event = stack.client.publish_retrieval(
        user, ranking_budget_ms=BUDGET_MS, expected_ranking_in_ms=10_000, expected_candidates=20, expected_suffix=4,
        history_version=lost.version(),
    )  # fmt: skip
    until(
        lambda: sum(jobs_done(stack.worker).get(each, 0) for each in ("computed", "already_cached")) > computed,
        "the newest history is prepared",
    )
    result = stack.ranked(user, 140, seed=31, request_id=event.request_id)
    assert (result.path, result.prefix_tokens) == (Path.HBM, 140)
    assert (result.history_stale_cause, result.timings.history_wait_us) == (StaleCause.GAP, None)
    until(lambda: stale(stack)["gap"] >= before["gap"] + 2, "both are counted")
    stack.client.publish_history(lost)
    until(lambda: not stack.ranked(user, 140, seed=31).history_stale, "the snapshot has come")
    mended = stack.ranked(user, 140, seed=31)
    assert (mended.history_stale_cause, mended.history_version) == (None, lost.version())


def test_a_version_from_before_the_users_deletion_is_answered_with_the_new_life_at_once(stack):
    user = new_user("again")
    stack.client.publish_history(history_of(user, 220, seed=32))
    assert stack.ranked(user, 220, seed=32).prefix_tokens == 221
    chosen_ms = int(time.time() * 1000) - 1_000
    stack.client.tombstone(user)
    stack.client.publish_history(history_of(user, 90, seed=33))
    # Its number is smaller, so nothing says that it is newer until the worker has read the deletion.
    until(lambda: stack.ranked(user, 90, seed=33).prefix_tokens == 91, "the new life is read")
    result = stack.ranked(user, 220, seed=32, query_time_ms=chosen_ms)
    assert (result.history_stale_cause, result.timings.history_wait_us) == (StaleCause.DELETED, None)
    assert (result.history_stale, result.history_version.length) == (True, 90)


def test_a_version_that_never_came_is_waited_for_once(stack):
    user, before = new_user("late"), reading(stack.worker).total("relaygr_worker_history_wait_seconds_count")
    first = stack.ranked(user, 70, seed=34)
    assert first.timings.history_wait_us and first.timings.history_wait_us <= BUDGET_MS * 1000 / 4
    assert (first.history_stale, first.history_stale_cause) == (True, StaleCause.MISSING)
    second = stack.ranked(user, 75, seed=34)
    assert (second.timings.history_wait_us, second.history_stale_cause) == (None, StaleCause.MISSING)
    until(lambda: reading(stack.worker).total("relaygr_worker_history_wait_seconds_count") > before, "counted")
    stack.client.publish_history(history_of(user, 75, seed=34))
    until(lambda: not stack.ranked(user, 75, seed=34).history_stale, "it has come")


def test_a_prefix_that_had_to_leave_hbm_comes_back_from_dram_with_the_same_scores(stack):
    user = new_user()
    request_id = stack.pre_infer(user, 512, seed=6)
    first = stack.ranked(user, 512, seed=6, request_id=request_id)
    until(lambda: reading(stack.worker).total("relaygr_cache_spills_ended_total") > 0, "spilled")

    def fill_hbm():
        for seed in range(20, 26):  # More than HBM holds.
            stack.full(512, seed)

    # On a busy machine copies are slow for a moment. Then the worker computes the prefix again.
    for _ in range(ATTEMPTS):
        fill_hbm()
        again = stack.ranked(user, 512, seed=6)
        if again.path is Path.DRAM:
            break
    assert (again.path, again.prefix_source) == (Path.DRAM, PrefixSource.DRAM)
    assert again.tokens_cached == again.prefix_tokens
    assert_same_scores(again, first)
    for _ in range(ATTEMPTS):
        fill_hbm()
        request_id = stack.pre_infer(user, 512, 6, "reloaded", "computed")
        relayed = stack.ranked(user, 512, seed=6, request_id=request_id)
        if relayed.prefix_source is PrefixSource.DRAM:
            break
    assert (relayed.path, relayed.prefix_source) == (Path.HBM, PrefixSource.DRAM)
    assert_same_scores(relayed, first)


def test_a_tombstone_deletes_the_user_everywhere(stack):
    user = new_user("deleted")
    stack.pre_infer(user, 200, seed=8)
    stack.client.tombstone(user)

    def is_gone() -> bool:
        return stack.ranked(user).prefix_tokens == 1

    until(is_gone, "the history is deleted")
    # The same history again: no part of it may still be cached.
    stack.client.publish_history(history_of(user, 200, seed=8))
    result = stack.ranked(user, 200, seed=8)
    assert (result.path, result.tokens_cached, result.prefix_tokens) == (Path.FULL, 0, 201)


def test_unknown_items_are_counted_in_the_result(stack):
    user = new_user()
    result = stack.ranked(user, candidates=np.array([1, 2, 10**12, -5], "<i8"))
    assert result.unknown_items == 2


def test_unknown_actions_and_features_are_counted_on_every_path(stack):
    """A log's doubled stars on a model with four action codes, and a pipeline that forgot the user's country."""
    user = new_user()
    one = history_of(user, 40, seed=21)
    actions = np.array([2, 4, 6, 8, 10] * 8, "<u2")
    behaviours = type(one.behaviours)(one.behaviours.items, actions, one.behaviours.timestamps_ms)
    wrong = type(one)(user, one.number, np.empty(0, "<i8"), behaviours)
    before = reading(stack.worker)
    for paths in ({Path.FULL}, {Path.HBM, Path.DRAM}):
        result = stack.ranked(user, history=wrong)
        assert (result.path in paths, result.unknown_actions, result.unknown_features) == (True, 32, 1)
        assert not result.history_missing

    def counted(name: str) -> float:
        return reading(stack.worker).total(name) - before.total(name)

    until(lambda: counted("relaygr_worker_unknown_features_total") == 2, "both requests are counted")
    assert counted("relaygr_worker_unknown_actions_total") == 64


def test_a_user_without_a_history_is_said_to_have_none(stack):
    """The commonest fault of an integration: the gateway's user ids are not those of the history pipeline."""
    user = new_user()
    stack.client.publish_history(history_of(user, 30, seed=22))
    result = stack.ranked(user.upper(), candidates=candidates_of())
    assert (result.history_missing, result.history_version, result.prefix_tokens) == (True, None, 1)
    known = stack.ranked(user, 30, seed=22)
    assert (known.history_missing, known.unknown_features, known.unknown_actions) == (None, None, None)


def test_more_candidates_than_the_model_takes_are_too_long(stack):
    outcome = stack.rank(new_user(), candidates=np.arange(MAX_CANDIDATES + 1))
    assert (outcome.status, outcome.reason) == (Ended.FAILED, Reason.TOO_LONG)
    assert str(MAX_CANDIDATES) in outcome.result.detail


def test_many_requests_at_once_get_one_answer_each(stack):
    before = stack.client.statistics()
    users = [new_user("burst") for _ in range(100)]
    for user in users:
        stack.client.publish_history(history_of(user, 64))
    futures = [
        stack.client.submit_rank(
            user, candidates_of(), budget_ms=BURST_BUDGET_MS, history_version=history_of(user, 64).version()
        )
        for user in users
        for _ in range(2)
    ]
    outcomes: list[RankOutcome] = [future.result(timeout=2 * BURST_BUDGET_MS / 1000) for future in futures]
    assert [(outcome.status, outcome.reason) for outcome in outcomes] == [(Ended.RANKED, None)] * 200
    after = stack.client.statistics()
    # A request that was sent again after a failed delivery report may have arrived twice.
    assert after.duplicates - before.duplicates <= after.retries - before.retries


# -- other gateways ------------------------------------------------------------------------------


def test_the_http_gateway_announces_ranks_and_gets_the_scores_that_the_client_gets(stack):
    (port,) = free_ports(1)
    gateway = stack.relay.processes.start("gateway", ["gateway"], "gateway", [f"gateway.listen_port={port}"])
    stack.relay.await_ready(gateway)
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)

    def post(path: str, **body: object) -> dict:
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        answer = connection.getresponse()
        content = json.loads(answer.read())
        assert answer.status in (200, 202), content
        return content

    user = new_user("http")
    history = history_of(user, 300, seed=11)
    stack.client.publish_history(history)
    version = {"number": 300, "length": 300, "digest": history.version().digest.hex()}
    before = jobs_done(stack.worker).get("computed", 0)
    event = post(
        "/v1/retrieval", user_id=user, expected_ranking_in_ms=10_000, expected_candidates=20, expected_suffix=0,
        ranking_budget_ms=BUDGET_MS, history_version=version,
    )  # fmt: skip
    until(lambda: jobs_done(stack.worker).get("computed", 0) > before, "a job")
    del event["status"]
    outcome = post(
        "/v1/rank", user_id=user, candidates=candidates_of().tolist(), budget_ms=BUDGET_MS, history_version=version,
        **event,
    )  # fmt: skip
    connection.close()
    assert (outcome["result"]["path"], outcome["result"]["tokens_cached"]) == ("hbm", 301)
    direct = stack.ranked(user, 300, seed=11, suffix=None, query_time_ms=event["query_time_ms"])
    assert np.float32(outcome["result"]["scores"]).tolist() == direct.scores.tolist()
    assert stack.relay.stop(gateway) == 0


def as_other_programs_see_it(stack: Stack) -> tuple[str, list[str], list[float]]:
    """A user whose history the worker knows, three candidates as text, and their scores."""
    user = new_user("other")
    stack.client.publish_history(history_of(user, 120, seed=12))
    scores = stack.ranked(user, 120, seed=12, candidates=np.array([7, 70, 170], "<i8"), suffix=None).scores
    return user, ["7", "70", "170"], scores.tolist()


def run_example(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_gateway_in_plain_python_gets_the_scores_that_the_client_gets(stack):
    user, candidates, scores = as_other_programs_see_it(stack)
    example = EXAMPLES / "gateway.py"
    assert not re.search(r"^\s*(from|import) relaygr", example.read_text(encoding="utf-8"), re.MULTILINE)
    kafka = stack.relay.kafka
    arguments = ["--prefix", kafka.topic_prefix, "--budget-ms", "20000", kafka.bootstrap, user, *candidates]
    said = json.loads(run_example([sys.executable, str(example), *arguments]))
    assert said["outcome"] == "ranked" and said["path"] in ("full", "pending", "hbm")
    assert said["scores"] == pytest.approx(scores, abs=TOLERANCE * max(map(abs, scores)))


def test_a_gateway_in_java_gets_the_scores_that_the_client_gets(stack, broker):
    if broker.kind is BrokerChoice.EMBEDDED:
        pytest.skip("Java's clients do not speak to the embedded cluster")
    jars = list((FilePath(os.environ.get("KAFKA_HOME", "/nowhere")) / "libs").glob("kafka-clients-*.jar"))
    if not jars:
        unavailable("broker", "KAFKA_HOME with kafka-clients is needed")
    program("jdk")
    user, candidates, scores = as_other_programs_see_it(stack)
    kafka = stack.relay.kafka
    slf4j = jars[0].parent.glob("slf4j-api-*.jar")
    command = ["java", "-XX:TieredStopAtLevel=1", "-cp", os.pathsep.join(map(str, [*jars, *slf4j]))]
    command += [str(EXAMPLES / "Gateway.java"), "--prefix", kafka.topic_prefix, "--budget-ms", "20000"]
    command += [kafka.bootstrap, user, *candidates]
    assert_ranked_as_text(run_example(command), scores)


def test_a_gateway_in_go_gets_the_scores_that_the_client_gets(stack, tmp_path):
    """With Debian's libraries, whose older client has another import path and the same functions."""
    libraries = GO_LIBRARIES / "src" / "github.com"
    client = "confluentinc/confluent-kafka-go"
    go = program("go")
    if not (libraries / client).is_dir() or not (libraries / "vmihailenco").is_dir():
        unavailable("go", f"Debian's golang-github-{client.replace('/', '-')}-dev and msgpack.v5-dev are needed")
    source, gateway = tmp_path / "gateway.go", tmp_path / "gateway"
    example = (EXAMPLES / "gateway.go").read_text(encoding="utf-8")
    source.write_text(example.replace(f"{client}/v2/kafka", f"{client}/kafka"), encoding="utf-8")
    built = {"GO111MODULE": "off", "GOPATH": str(GO_LIBRARIES), "GOCACHE": str(tmp_path / "cache")}
    subprocess.run([go, "build", "-o", gateway, source], env={**os.environ, **built}, check=True, timeout=120)
    user, candidates, scores = as_other_programs_see_it(stack)
    kafka = stack.relay.kafka
    arguments = ["--prefix", kafka.topic_prefix, "--budget-ms", "20000", kafka.bootstrap, user, *candidates]
    assert_ranked_as_text(run_example([str(gateway), *arguments]), scores)


def assert_ranked_as_text(said: str, scores: list[float]) -> None:
    outcome, path, *found = said.replace("[", " ").replace("]", " ").split()
    assert outcome == "ranked" and path in ("full", "pending", "hbm")
    assert [float(score) for score in found] == pytest.approx(scores, abs=TOLERANCE * max(map(abs, scores)))


# -- bad input -----------------------------------------------------------------------------------

CO_PARTITIONED_READ = (Topic.RETRIEVAL, Topic.PREINFER, Topic.RANKING, Topic.HISTORY, Topic.BEHAVIOURS)


def garbage() -> dict[str, bytes]:
    """Invalid messages by name. They differ in every call, so that their dead letters can be identified."""
    salt = os.urandom(8)
    return {
        "random": b"\x00" + os.urandom(300),
        "text": b'{"user_id": "x"}' + salt,
        "later version": b"\x63" + salt,
        "empty map": b"\x01\x80" + salt,
        "nothing but a version": b"\x01",
        "oversized": b"\x01" + salt + bytes(MAX_MESSAGE_BYTES),
    }


@pytest.mark.parametrize("topic", CO_PARTITIONED_READ, ids=str)
def test_garbage_goes_to_dead_letters_as_it_came_and_the_loop_goes_on(stack, topic):
    name = stack.relay.kafka.topic(topic)
    # A real broker refuses what is longer than the topic takes.
    sent = {what: value for what, value in garbage().items() if len(value) < CATALOGUE[topic].max_message_bytes}
    for value in sent.values():
        stack.raw.send(topic, value)
    for what, value in sent.items():
        headers = stack.letters.of(value, name)
        assert headers["dead_letter_reason"], what
        assert headers["dead_letter_detail"], what
        assert int(headers["origin_partition"]) in range(PARTITIONS)
        assert int(headers["origin_offset"]) >= 0
    user = new_user()
    request_id = stack.pre_infer(user, 100, seed=2)
    assert stack.ranked(user, 100, seed=2, request_id=request_id).path is Path.HBM
    if topic in (Topic.PREINFER, Topic.RANKING):
        stack.relay.await_all_committed(topic)


def test_garbage_on_the_topics_of_results_and_statuses_disturbs_nobody(stack):
    for topic, partition in ((Topic.RESULTS, stack.client.results_partition), (Topic.WORKERS, 0)):
        for value in garbage().values():
            if topic is Topic.RESULTS or len(value) < 1 << 20:
                stack.raw.send(topic, value, partition=partition)
        stack.raw.send(topic, None, partition=partition)
    user = new_user()
    request_id = stack.pre_infer(user, 100, seed=2)
    assert stack.ranked(user, 100, seed=2, request_id=request_id).path is Path.HBM


@pytest.mark.parametrize("what", list(garbage()))
def test_an_undecodable_request_with_reply_headers_is_answered_failed_too(stack, what):
    value = garbage()[what]
    headers = stack.raw.headers()
    stack.raw.send(Topic.RANKING, value, headers=headers.encode())
    result = stack.raw.answer(headers)
    assert (result.outcome, result.reason) == (Ended.FAILED, Reason.UNDECODABLE)
    assert result.detail
    letter = stack.letters.of(value, stack.relay.kafka.topic(Topic.RANKING), request_id=headers.request_id)
    assert letter["dead_letter_reason"]


def test_an_empty_message_is_a_dead_letter_on_the_topics_that_take_no_tombstones(stack):
    for topic in (Topic.RANKING, Topic.PREINFER, Topic.RETRIEVAL):
        stack.raw.send(topic, None)
        assert stack.letters.of(None, stack.relay.kafka.topic(topic))["dead_letter_reason"]


def test_a_request_on_the_wrong_partition_is_told_which_partitioner_to_use(stack):
    user = new_user()
    headers = stack.raw.headers()
    wrong = (partition_for(user.encode(), PARTITIONS) + 1) % PARTITIONS
    value = codec.encode(stack.raw.request(headers, user))
    stack.raw.send(Topic.RANKING, value, user.encode(), headers.encode(), wrong)
    result = stack.raw.answer(headers)
    assert result.reason is Reason.WRONG_PARTITIONER
    assert "murmur2" in result.detail


def test_a_request_whose_answer_has_nowhere_to_go_is_a_dead_letter_and_blocks_nothing(stack):
    """Even with a deadline years away, the offset must not wait for the deadline."""
    user = new_user()
    headers = stack.raw.headers(budget_ms=10 * 365 * 86_400_000, reply_partition=3_999)
    value = codec.encode(stack.raw.request(headers, user))
    stack.raw.send(Topic.RANKING, value, user.encode(), headers.encode())
    letter = stack.letters.of(value, stack.relay.kafka.topic(Topic.RANKING), request_id=headers.request_id)
    assert "reply_partition is 3999" in letter["dead_letter_detail"]
    stack.relay.await_all_committed(Topic.RANKING)


def test_everything_that_was_sent_is_committed_at_the_end(stack):
    stack.relay.await_all_committed(Topic.RANKING, Topic.PREINFER)
    for child in (stack.worker, stack.trigger):
        assert child.process.poll() is None


# -- the end of this module: these stop the worker ------------------------------------------------


def test_sigterm_answers_what_was_received_commits_and_nothing_is_done_twice(stack):
    """Requests come while the worker stops and before its successor runs; each is answered exactly once."""
    users = [new_user("drain") for _ in range(60)]
    futures = []

    def send(part: list[str]) -> None:
        futures.extend(
            stack.client.submit_rank(user, candidates_of(), budget_ms=60_000, history=history_of(user, 400))
            for user in part
        )

    before = stack.client.statistics()
    stack.raw.read()
    raw = [stack.raw.rank(new_user("raw"), budget_ms=60_000) for _ in range(10)]
    send(users[:40])
    assert stack.relay.stop(stack.worker) == 0
    send(users[40:])
    stack.worker = stack.relay.start_worker()
    stack.relay.await_ready(stack.worker)
    outcomes = [future.result(timeout=60) for future in futures]
    unranked = [(place, outcome) for place, outcome in enumerate(outcomes) if outcome.status is not Ended.RANKED]
    assert not unranked
    after = stack.client.statistics()
    # A request that was sent again after a failed delivery report may have arrived twice.
    assert after.duplicates - before.duplicates <= after.retries - before.retries
    for headers in raw:
        stack.raw.answer(headers)
    stack.raw.read()
    assert [len(stack.raw.answers[headers.request_id]) for headers in raw] == [1] * len(raw)
    stack.relay.await_all_committed(Topic.RANKING)


def test_a_backlog_that_expired_while_no_worker_ran_is_answered_expired(stack):
    assert stack.relay.stop(stack.worker) == 0
    headers = [stack.raw.rank(new_user("backlog"), budget_ms=300) for _ in range(20)]
    stack.worker = stack.relay.start_worker()
    stack.relay.await_ready(stack.worker)
    assert {stack.raw.answer(one).outcome for one in headers} == {Ended.EXPIRED}
    assert reading(stack.worker).total("relaygr_worker_device_seconds_total") == 0
    stack.relay.await_all_committed(Topic.RANKING)


def test_with_the_trigger_gone_requests_are_ranked_in_full(stack):
    assert stack.relay.stop(stack.trigger) == 0
    user = new_user()
    history = history_of(user, 100, seed=2)
    stack.client.publish_history(history)
    event = stack.client.publish_retrieval(
        user, ranking_budget_ms=BUDGET_MS, expected_ranking_in_ms=1_000, expected_candidates=20, expected_suffix=4,
        history_version=history.version(),
    )  # fmt: skip
    result = stack.ranked(user, 100, seed=2, request_id=event.request_id)
    assert result.path is Path.FULL
