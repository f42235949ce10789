"""Writes a record that Kafka takes, and that Python's Kafka clients choke on: a header whose name is not UTF-8."""

from __future__ import annotations

import asyncio
from typing import Any

import aiokafka
import pytest
from aiokafka.producer import message_accumulator
from aiokafka.producer import producer as producer_module
from aiokafka.record.default_records import _DefaultRecordBatchBuilderPy

from relaygr.kafka.settings import KafkaSettings


class _NotUtf8(str):
    """A text that says of itself to be other bytes."""

    def encode(self, *_: Any, **__: Any) -> bytes:
        return b"\xff\xfe"


async def send_bad_header(kafka: KafkaSettings, topic: str, partition: int, value: bytes, key: bytes = b"u") -> None:
    """Returns when the cluster has it. aiokafka's compiled builder would not ask the text for its bytes."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (message_accumulator, producer_module):
            patch.setattr(module, "DefaultRecordBatchBuilder", _DefaultRecordBatchBuilderPy)
        producer = aiokafka.AIOKafkaProducer(bootstrap_servers=kafka.bootstrap.split(","))
        await producer.start()
        try:
            headers = [(_NotUtf8("name"), b"1")]
            await producer.send_and_wait(topic, value, key=key, partition=partition, headers=headers)
        finally:
            await producer.stop()


def write_bad_header(kafka: KafkaSettings, topic: str, partition: int, value: bytes) -> None:
    """`send_bad_header` without a loop."""
    asyncio.run(send_bad_header(kafka, topic, partition, value))
