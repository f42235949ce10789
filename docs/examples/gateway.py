"""A gateway in plain Python, without the package relaygr: one impression of one user.

    pip install confluent-kafka msgpack
    python gateway.py --prefix relaygr --budget-ms 1000 127.0.0.1:9092 ann 101 102 103

It shows what a gateway in any language does: it publishes a retrieval event, sends the ranking request with a reply
address in its headers, and reads the result from its partition of the results topic. `docs/messages.md` has all fields.
"""

import argparse
import json
import secrets
import struct
import sys
import time

import msgpack
from confluent_kafka import Consumer, Producer, TopicPartition

SCHEMA_VERSION = b"\x01"


def encode(body: dict) -> bytes:
    """A message: one byte with the schema version, then a MessagePack map."""
    return SCHEMA_VERSION + msgpack.packb(body)


def decode(value: bytes) -> dict:
    if value[:1] != SCHEMA_VERSION:
        raise ValueError(f"schema version {value[:1]!r}: this gateway knows version 1")
    return msgpack.unpackb(value[1:])


def packed(numbers: list[int], code: str = "q") -> bytes:
    """An array: little-endian 64-bit numbers (`H`: unsigned 16-bit ones)."""
    return struct.pack(f"<{len(numbers)}{code}", *numbers)


def now_us() -> int:
    return time.time_ns() // 1000


def main() -> int:
    parser = argparse.ArgumentParser(description="Rank candidates for one user.")
    parser.add_argument("bootstrap")
    parser.add_argument("user")
    parser.add_argument("candidates", type=int, nargs="+")
    parser.add_argument("--prefix", default="relaygr", help="topic prefix")
    parser.add_argument("--budget-ms", type=int, default=1000)
    chosen = parser.parse_args()
    gateway_id, results = "python-gateway", f"{chosen.prefix}.results"

    # Every producer of the relay uses Java's murmur2: librdkafka's default is another hash.
    producer = Producer(
        {"bootstrap.servers": chosen.bootstrap, "partitioner": "murmur2_random", "linger.ms": 0, "acks": "all"}
    )
    # `assign` without a group. The end is looked up before the request is sent, so that no answer is missed.
    reading = {"group.id": "unused", "enable.auto.commit": False, "fetch.wait.max.ms": 5}
    consumer = Consumer({"bootstrap.servers": chosen.bootstrap, **reading})
    reply = TopicPartition(results, 0)
    reply.offset = consumer.get_watermark_offsets(reply, timeout=10)[1]
    consumer.assign([reply])

    # The id of the impression. The end is random: a result is accepted only by who knows the id.
    request_id = f"{gateway_id}.{now_us() // 1000:x}.1.{secrets.token_hex(8)}"
    retrieval_us = now_us()
    event = {
        "request_id": request_id,
        "user_id": chosen.user,
        "retrieval_at_us": retrieval_us,
        "expected_ranking_at_us": retrieval_us + 150_000,
        "ranking_budget_ms": chosen.budget_ms,
        "expected_candidates": len(chosen.candidates),
        "expected_suffix": 0,
    }
    producer.produce(f"{chosen.prefix}.retrieval", encode(event), chosen.user.encode())
    producer.flush(10)

    # ... retrieval and pre-processing find the candidates; meanwhile the relay computes the user's prefix ...

    sent_us = now_us()
    deadline_us = sent_us + chosen.budget_ms * 1000
    request = {
        "request_id": request_id,
        "user_id": chosen.user,
        "sent_at_us": sent_us,
        "deadline_us": deadline_us,
        "query_time_ms": retrieval_us // 1000,
        "candidates": packed(chosen.candidates),
        "suffix": {"items": packed([]), "actions": packed([], "H"), "timestamps_ms": packed([])},
    }
    headers = [
        ("request_id", request_id.encode()),
        ("gateway_id", gateway_id.encode()),
        ("reply_topic", results.encode()),
        ("reply_partition", b"0"),
        ("deadline_us", str(deadline_us).encode()),
    ]
    producer.produce(f"{chosen.prefix}.ranking", encode(request), chosen.user.encode(), headers=headers)
    producer.poll(0)

    result = None
    while result is None and now_us() < deadline_us:
        message = consumer.poll(0.05)
        producer.poll(0)
        if message is None or message.error() is not None:
            continue
        # Other gateways may share the partition.
        if dict(message.headers() or ()).get("request_id") == request_id.encode():
            result = decode(message.value())
    consumer.close()
    producer.flush(1)
    if result is None:
        print(json.dumps({"outcome": "timed_out"}))
        return 1
    answer = {name: result[name] for name in ("outcome", "reason", "path", "num_tasks") if result.get(name) is not None}
    if "scores" in result:
        # float32, row-major: num_tasks for each candidate.
        answer["scores"] = list(struct.unpack(f"<{len(result['scores']) // 4}f", result["scores"]))
    print(json.dumps(answer))
    return 0 if result["outcome"] == "ranked" else 1


if __name__ == "__main__":
    sys.exit(main())
