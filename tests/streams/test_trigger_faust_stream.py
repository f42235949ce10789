"""How the trigger runs faust and aiokafka: repeated log lines in an outage."""

from __future__ import annotations

import logging

import pytest

from relaygr.trigger.faust_stream import limit_log_repeats


def test_a_flood_of_one_message_is_one_line_and_other_messages_pass(caplog: pytest.LogCaptureFixture) -> None:
    limit_log_repeats()
    limit_log_repeats()
    log = logging.getLogger("aiokafka.consumer.fetcher")
    with caplog.at_level(logging.WARNING):
        for node in range(1000):
            log.warning("flood at node %s", node)
        log.warning("something else")
    messages = [record.getMessage() for record in caplog.records]
    assert messages[0] == "flood at node 0"
    assert "something else" in messages
    # A slow machine may cross into the next second.
    assert len(messages) < 10
