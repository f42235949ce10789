"""Test vectors of the wire form, for producers and consumers in other languages.

    python -m relaygr.schemas.vectors --against FILE       check another implementation's file

`wire.json` lies beside this file and needs no Python to be read:

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
from collections.abc import Iterator
from importlib import resources
from typing import Any

from relaygr.schemas import messages
from relaygr.schemas.codec import DecodeError, decode
from relaygr.schemas.json_messages import to_json

FILE = "wire.json"


def wire_file() -> Any:
    """The shipped file, parsed."""
    return json.loads(resources.files(__package__).joinpath(FILE).read_text(encoding="utf-8"))


def differences(theirs: Any, ours: Any) -> Iterator[str]:
    """Where another implementation's vectors differ from the shipped ones: one sentence for each.

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
        fields = to_json(decode(getattr(messages, expected["kind"]), bytes.fromhex(wire)))
    except (DecodeError, ValueError, TypeError) as error:
        yield f"{where}: the bytes cannot be read: {error}"
        return
    for name in fields.keys() | expected["fields"].keys():
        if fields.get(name) != expected["fields"].get(name):
            yield f"{where}: the bytes say {name} = {fields.get(name)!r}, expected {expected['fields'].get(name)!r}"


def _identity(entry: Any) -> str:
    return str(entry.get("name", entry.get("user_id"))) if isinstance(entry, dict) else repr(entry)
