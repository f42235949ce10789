"""The shipped test vectors are those of this package, and the checker finds what differs.

`wire.json` is the record of the wire form. A change of an entry changes the wire form: read the policy in
`relaygr.schemas.codec` first.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgpack
import pytest

from relaygr.schemas import Other, WorkerStatus, decode, encode
from relaygr.schemas.codec import SCHEMA_VERSION
from relaygr.schemas.vectors import differences, wire_file
from relaygr.schemas.vectors.__main__ import main
from tests.schemas.wire_samples import HEADERS, HISTORY, MESSAGES
from tests.schemas.wire_vectors import vectors, write

OURS = vectors()
SHIPPED = {entry["name"]: bytes.fromhex(entry["wire"]) for entry in wire_file()["messages"]}
SHIPPED_HEADERS = {entry["name"]: entry["headers"] for entry in wire_file()["headers"]}


def test_the_shipped_file_is_what_this_package_computes() -> None:
    assert wire_file() == OURS, "run: make docs, if the wire form was to change"


@pytest.mark.parametrize("name", MESSAGES)
def test_the_shipped_bytes_are_read_as_the_message(name: str) -> None:
    assert decode(type(MESSAGES[name]), SHIPPED[name]) == MESSAGES[name]


@pytest.mark.parametrize("name", HEADERS)
def test_the_shipped_headers_are_read_as_the_headers(name: str) -> None:
    wire = [(key, value.encode()) for key, value in SHIPPED_HEADERS[name]]
    assert type(HEADERS[name]).decode(wire) == HEADERS[name]


def test_a_version_names_its_history() -> None:
    version = HISTORY.version()
    digest = next(entry["digest"] for entry in wire_file()["digests"] if entry["name"] == "two behaviours")
    assert (version.number, version.length, version.digest.hex()) == (7, 2, digest)


@pytest.mark.parametrize("lacks", [("c3", "b3"), ("b3",)], ids=["before c3", "before b3"])
def test_a_status_of_an_older_worker_is_read_with_the_default_of_what_it_lacks(lacks: tuple[str, ...]) -> None:
    status = MESSAGES["WorkerStatus"]
    body = msgpack.unpackb(SHIPPED["WorkerStatus"][1:])
    for name in lacks:
        del body["latency"][name]
    older = bytes((SCHEMA_VERSION,)) + msgpack.packb(body)
    assert decode(WorkerStatus, older) == replace(status, latency=replace(status.latency, **dict.fromkeys(lacks, 0.0)))


@pytest.mark.parametrize(
    ("name", "field", "known", "unknown"),
    [
        ("RankingResult, ranked", "path", b"\xa3hbm", "remote"),
        ("RankingResult, ranked", "prefix_source", b"\xa8computed", "peer"),
        ("RankingResult, failed", "reason", b"\xabundecodable", "quota_exceeded"),
        ("WorkerStatus", "state", b"\xa5ready", "draining"),
    ],
)
def test_unknown_members_of_open_choices_are_kept_with_their_text(
    name: str, field: str, known: bytes, unknown: str
) -> None:
    """A newer version sends them."""
    assert SHIPPED[name].count(known) == 1
    wire = SHIPPED[name].replace(known, msgpack.packb(unknown))
    message = replace(MESSAGES[name], **{field: Other(unknown)})
    assert decode(type(message), wire) == message
    assert encode(message) == wire


def test_there_is_a_vector_of_each_message_and_fifty_of_the_routing() -> None:
    kinds = {entry["kind"] for entry in OURS["messages"]}
    assert kinds == {
        "RetrievalEvent",
        "PreInferJob",
        "RankingRequest",
        "RankingResult",
        "History",
        "BehaviourEvent",
        "WorkerStatus",
    }
    users = [entry["user_id"] for entry in OURS["routing"]]
    assert len(set(users)) == len(users) == 50
    assert {len(user.encode()) % 4 for user in users} == {0, 1, 2, 3}


def test_the_digest_of_each_step_is_that_of_what_it_says_is_hashed() -> None:
    for entry in OURS["digests"]:
        for step in entry["steps"]:
            assert blake2b(bytes.fromhex(step["hashed"]), digest_size=16).hexdigest() == step["digest"]
        assert entry["steps"][-1]["digest"] == entry["digest"]


def test_other_bytes_of_the_same_message_agree() -> None:
    """A writer of another language may order the fields of a map in another way."""
    entry = next(entry for entry in OURS["messages"] if entry["name"] == "History")
    wire = bytes.fromhex(entry["wire"])
    user = b"\xa7user_id\xa7user-\xc3\xa9"
    assert user in wire
    moved = wire.replace(user, b"") + user
    assert list(differences({"messages": [{"name": "History", "wire": moved.hex()}]}, OURS)) == []


def changed(section: str, place: int, **values: Any) -> dict[str, Any]:
    return {section: [copy.deepcopy(OURS[section][place]) | values]}


@pytest.mark.parametrize(
    ("theirs", "said"),
    [
        (changed("routing", 3, partitions={"12": 0, "48": 0}), "routing, abcd: partitions is"),
        (changed("digests", 1, digest="00" * 16), "digests, two behaviours: digest is"),
        (changed("messages", 0, wire="0180"), "the bytes cannot be read: RetrievalEvent.request_id: is required"),
        (changed("messages", 0, wire="zz"), "the bytes cannot be read"),
        ({"messages": [{"name": "Unheard", "wire": "01"}]}, "there is no entry 'Unheard'"),
        ({"partitions": []}, "there is no such list"),
        ({"schema_version": 2}, "schema_version: 2, expected 1"),
        ([], "not a JSON object"),
    ],
)
def test_what_differs_is_named(theirs: Any, said: str) -> None:
    (line,) = differences(theirs, OURS)
    assert said in line


def test_a_changed_field_is_named_by_its_value() -> None:
    budget = b"\xb1ranking_budget_ms".hex()
    wire = OURS["messages"][0]["wire"].replace(f"{budget}32", f"{budget}33")
    (line,) = differences({"messages": [{"name": "RetrievalEvent", "wire": wire}]}, OURS)
    assert line.endswith("the bytes say ranking_budget_ms = 51, expected 50")


def test_the_writer_adds_entries_and_refuses_to_change_or_remove_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "wire.json"
    earlier = OURS | {"messages": OURS["messages"][:-1]}
    file.write_text(json.dumps(earlier), encoding="utf-8")
    assert write(file, OURS) == 0
    assert json.loads(file.read_text(encoding="utf-8")) == OURS
    other = copy.deepcopy(OURS)
    other["messages"][3]["wire"] = "0180"
    for ours in (other, earlier):
        assert write(file, ours) == 1
        assert "delete the line from the file first" in capsys.readouterr().err
    assert json.loads(file.read_text(encoding="utf-8")) == OURS


@pytest.mark.parametrize(
    ("content", "code", "said"),
    [
        (lambda: json.dumps({"routing": OURS["routing"]}), 0, "agrees: 50 routing"),
        (lambda: json.dumps(changed("routing", 0, murmur2=1)), 1, "routing, a: murmur2 is 1"),
        (lambda: "{", 2, "cannot be read"),
    ],
)
def test_the_checker_says_with_its_exit_code_whether_a_file_agrees(
    content: Callable[[], str], code: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "theirs.json"
    file.write_text(content(), encoding="utf-8")
    assert main(["--against", str(file)]) == code
    assert said in "".join(capsys.readouterr())
