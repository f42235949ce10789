"""`relaygr trigger record` and `relaygr trigger replay`: policies of the trigger on recorded events."""

from __future__ import annotations

import dataclasses
import json
import secrets
import time
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, Message, TopicPartition
from rich.table import Table

from relaygr.cli.options import BootstrapOption, ConfigOption, SetOption, command_settings
from relaygr.cli.texts import plain_console
from relaygr.kafka.clients import make_assigned_consumer, require_broker
from relaygr.kafka.message_headers import headers_of
from relaygr.replay.recording import RecordingWriter, RetrievalLine, read_recording
from relaygr.replay.trigger import PolicyResult, replay_trigger
from relaygr.runtime.errors import RelayError
from relaygr.schemas.codec import DecodeError, decode
from relaygr.schemas.headers import is_job
from relaygr.schemas.messages import RankingRequest, RetrievalEvent, WorkerStatus
from relaygr.schemas.topics import Topic
from relaygr.settings import Settings
from relaygr.trigger.policies import policy_names

_POLL_S: Final = 0.2
_TOPICS: Final = (Topic.RETRIEVAL, Topic.RANKING, Topic.WORKERS)


def record(
    out: Annotated[Path, typer.Argument(metavar="EVENTS", help="File to write.", show_default=False)],
    seconds: Annotated[float, typer.Option(min=0, help="How long new messages are recorded; 0: none.")] = 0.0,
    most: Annotated[int, typer.Option(min=1, help="Messages after which the recording ends.")] = 1_000_000,
    config: ConfigOption = None,
    bootstrap: BootstrapOption = None,
    overrides: SetOption = None,
) -> None:
    """Record events, ranking requests and statuses: those of the last minutes, which the topics hold, and new ones.

    User ids are replaced by hashes, and behaviours and item ids are left out.
    """
    settings = command_settings(config, bootstrap, overrides)
    require_broker(settings)
    console = plain_console()
    consumer = make_assigned_consumer(settings, "trigger-record", options={"enable.partition.eof": True})
    try:
        with out.open("w", encoding="utf-8") as file:
            counts = _record(consumer, settings, RecordingWriter(file, secrets.token_bytes(16)), seconds, most)
    except OSError as error:
        raise RelayError(f"The recording {out} cannot be written: {error.strerror}.") from error
    finally:
        consumer.close()
    listed = ", ".join(f"{count:,} of {topic}" for topic, count in counts.items())
    console.print(f"{listed} recorded in {out}", soft_wrap=True)


def _record(
    consumer: Consumer, settings: Settings, writer: RecordingWriter, seconds: float, most: int
) -> dict[str, int]:
    names = {settings.topic(topic): topic for topic in _TOPICS}
    known = consumer.list_topics(timeout=10).topics
    places = [
        TopicPartition(name, partition, OFFSET_BEGINNING)
        for name in names
        for partition in (known[name].partitions if name in known else ())
    ]
    if {place.topic for place in places} != set(names):
        raise RelayError(f"A topic of {', '.join(names)} does not exist: run `relaygr topics create`.")
    consumer.assign(places)
    unread = {(place.topic, place.partition) for place in places}
    counts = {topic.value: 0 for topic in _TOPICS}
    ends_s = time.monotonic() + seconds
    while sum(counts.values()) < most and (unread or time.monotonic() < ends_s):
        message = consumer.poll(_POLL_S)
        if message is None:
            continue
        error = message.error()
        if error is None:
            topic = names[str(message.topic())]
            counts[topic.value] += _write(writer, topic, message)
        elif error.code() == KafkaError._PARTITION_EOF:
            unread.discard((str(message.topic()), message.partition() or 0))
        elif error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED:
            raise RelayError(f"Kafka refuses to read {message.topic()}: give this user the right to read it.")
    return counts


def _write(writer: RecordingWriter, topic: Topic, message: Message) -> bool:
    """Writes one message; False for one that is no message of ours."""
    value: Any = message.value()
    try:
        if topic is Topic.WORKERS:
            if not value:
                return False
            writer.status(decode(WorkerStatus, value))
        elif topic is Topic.RETRIEVAL:
            _, at_ms = message.timestamp()
            writer.retrieval(decode(RetrievalEvent, value), message.partition() or 0, at_ms * 1000)
        elif is_job(headers_of(message)):
            return False
        else:
            writer.ranking(decode(RankingRequest, value))
    except DecodeError:
        return False
    return True


def replay(
    events: Annotated[
        Path, typer.Argument(metavar="EVENTS", help="File of `relaygr trigger record`.", show_default=False)
    ],
    policy: Annotated[
        list[str] | None, typer.Option(help="Name of a policy. May be repeated.", show_default="all")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    config: ConfigOption = None,
    overrides: SetOption = None,
) -> None:
    """Compare policies on recorded events, with the settings `trigger.*` and `admission.*`.

    Wasted: no request used the prefix. Needless: the request would have been in time without it. Missed: the request
    was not in time. Prepared: HBM that the jobs fill. Jobs: device time of the jobs. Device: device time of jobs and
    requests. All follow from the latency models that the workers reported.
    """
    settings = command_settings(config, overrides=overrides)
    lines = read_recording(events)
    if not any(isinstance(line, RetrievalLine) for line in lines):
        raise RelayError(f"{events} has no retrieval event: record while a gateway sends some.")
    results = []
    for name in policy or policy_names():
        own = settings.trigger.model_copy(update={"policy": name})
        results.append(replay_trigger(lines, own, settings.admission, settings.served))
    if not any(result.requests for result in results):
        raise RelayError(f"{events} has no request with an event and a worker's status: record while workers run.")
    if as_json:
        rows = [{**dataclasses.asdict(result), "device_us": result.device_us} for result in results]
        typer.echo(json.dumps(rows, indent=2))
        return
    console = plain_console()
    span_s = (lines[-1].at_us - lines[0].at_us) / 1e6
    found = f"{results[0].events:,} events, {results[0].requests:,} requests in {span_s:,.0f} s"
    console.print(f"{events}: {found}", soft_wrap=True)
    console.print(_table(results))


def _table(results: list[PolicyResult]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0))
    for name in ("policy", "admitted", "wasted", "needless", "missed", "prepared", "jobs", "device"):
        table.add_column(name, justify="left" if name == "policy" else "right", no_wrap=True)
    for result in results:
        table.add_row(
            result.policy,
            f"{result.jobs:,}",
            f"{result.wasted:,}",
            f"{result.needless:,}",
            f"{result.missed:,} ({result.missed / max(1, result.requests):.1%})",
            f"{result.prepared_bytes / 2**20:,.1f} MiB",
            f"{result.prepare_us / 1e6:,.2f} s",
            f"{result.device_us / 1e6:,.2f} s",
        )
    return table
