"""Test vectors of the wire form, for producers and consumers in other languages.

    python -m relaygr.schemas.vectors                      check this package against wire.json
    python -m relaygr.schemas.vectors --against FILE       check another implementation's file
    python -m relaygr.schemas.vectors --write              add new entries to wire.json

Deployed programs send the bytes of `wire.json`, so `--write` refuses to change an entry. The file lies
beside this one and needs no Python to be read:

* `messages`: for each message its `fields` as JSON (arrays as lists, digests in hexadecimal digits) and its `wire`
  bytes in hexadecimal digits. A writer may order the fields of a map in another way; a reader must get the same fields.
* `refused`: bytes that a reader must refuse, and the reason.
* `headers`: names and values of the record headers.
* `digests`: for each history every step of its digest chain: what is hashed (BLAKE2b, 16 bytes), and the digest.
* `routing`: for each user id its key, the murmur2 of the key (unsigned) and its partition, for each partition count.

An implementation's file has the same form, and may leave out lists, entries of lists, and all members of an entry but
those that identify it (`name`, `user_id`) and those to be checked.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from importlib import resources
from typing import Any

from relaygr.schemas.codec import SCHEMA_VERSION, DecodeError, decode, encode
from relaygr.schemas.digest import BLOCK, digest_chain
from relaygr.schemas.json_messages import to_json
from relaygr.schemas.messages import History
from relaygr.schemas.partitioner import murmur2, partition_for
from relaygr.schemas.vectors.samples import HEADERS, HISTORIES, MESSAGES, PARTITION_COUNTS, REFUSED, USER_IDS

FILE = "wire.json"
_BY_KIND = {type(message).__name__: type(message) for message in MESSAGES.values()}


def wire_file() -> Any:
    """The shipped file, parsed."""
    return json.loads(resources.files(__package__).joinpath(FILE).read_text(encoding="utf-8"))


def vectors() -> dict[str, Any]:
    """The vectors that this package computes."""
    return {
        "schema_version": SCHEMA_VERSION,
        "messages": [
            {"name": name, "kind": type(message).__name__, "fields": to_json(message), "wire": encode(message).hex()}
            for name, message in MESSAGES.items()
        ],
        "refused": [
            {"name": name, "kind": kind.__name__, "wire": data.hex(), "reason": _reason(kind, data)}
            for name, (kind, data) in REFUSED.items()
        ],
        "headers": [
            {"name": name, "headers": [[key, value.decode()] for key, value in headers.encode()]}
            for name, headers in HEADERS.items()
        ],
        "digests": [_digests(name, history) for name, history in HISTORIES.items()],
        "routing": [_route(user_id) for user_id in USER_IDS],
    }


def differences(theirs: Any, ours: Any) -> Iterator[str]:
    """Where another implementation's vectors differ from ours: one sentence for each.

    The bytes of a message are compared by what they decode to, since the order of fields is free.
    """
    if not isinstance(theirs, dict):
        yield "the file is not a JSON object"
        return
    for section, entries in theirs.items():
        if section not in ours:
            yield f"{section}: there is no such list; the lists are {', '.join(ours)}"
        elif not isinstance(entries, list):
            if entries != ours[section]:
                yield f"{section}: {entries!r}, expected {ours[section]!r}"
        else:
            known = {_identity(entry): entry for entry in ours[section]}
            for entry in entries:
                yield from _compare(section, entry, known)


def _compare(section: str, entry: Any, known: dict[str, Any]) -> Iterator[str]:
    identity = _identity(entry)
    expected = known.get(identity)
    if expected is None:
        yield f"{section}: there is no entry {identity!r}"
        return
    for name, value in entry.items():
        if name == "wire" and section == "messages":
            yield from _compare_wire(f"{section}, {identity}", value, expected)
        elif value != expected.get(name):
            shown, wanted = (json.dumps(each, ensure_ascii=False) for each in (value, expected.get(name)))
            yield f"{section}, {identity}: {name} is {shown[:120]}, expected {wanted[:120]}"


def _compare_wire(where: str, wire: Any, expected: dict[str, Any]) -> Iterator[str]:
    try:
        fields = to_json(decode(_BY_KIND[expected["kind"]], bytes.fromhex(wire)))
    except (DecodeError, ValueError, TypeError) as error:
        yield f"{where}: the bytes cannot be read: {error}"
        return
    for name in fields.keys() | expected["fields"].keys():
        if fields.get(name) != expected["fields"].get(name):
            yield f"{where}: the bytes say {name} = {fields.get(name)!r}, expected {expected['fields'].get(name)!r}"


def _identity(entry: Any) -> str:
    return str(entry.get("name", entry.get("user_id"))) if isinstance(entry, dict) else repr(entry)


def _reason(kind: type[Any], data: bytes) -> str:
    try:
        decode(kind, data)
    except DecodeError as error:
        return error.reason.value
    raise AssertionError(f"{kind.__name__} {data.hex()} can be decoded")


def _digests(name: str, history: History) -> dict[str, Any]:
    chain = digest_chain(history.features, history.behaviours)
    features = history.features.astype("<i8").tobytes()
    hashed = [b"relaygr.history.1" + struct.pack("<I", history.features.size) + features]
    blocks = chain.blocks
    for number in range(len(blocks)):
        block = history.behaviours[number * BLOCK : (number + 1) * BLOCK]
        before = chain.after(number)
        arrays = (block.items.astype("<i8"), block.actions.astype("<u2"), block.timestamps_ms.astype("<i8"))
        hashed.append(before + b"".join(array.tobytes() for array in arrays))
    steps = [
        {"hashed": data.hex(), "digest": digest.hex()}
        for data, digest in zip(hashed, (chain.seed, *blocks), strict=True)
    ]
    return {"name": name, "history": to_json(history), "steps": steps, "digest": chain.digest.hex()}


def _route(user_id: str) -> dict[str, Any]:
    key = user_id.encode()
    partitions = {str(count): partition_for(key, count) for count in PARTITION_COUNTS}
    return {"user_id": user_id, "key": key.hex(), "murmur2": murmur2(key), "partitions": partitions}
