"""Makes the test vectors that the package ships: `python -m tests.schemas.wire_vectors` adds new ones to `wire.json`.

Deployed programs send the bytes of `wire.json`, so the writer refuses to change an entry.
"""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path
from typing import Any

from relaygr.schemas.codec import SCHEMA_VERSION, DecodeError, decode, encode
from relaygr.schemas.digest import BLOCK, digest_chain
from relaygr.schemas.json_messages import to_json
from relaygr.schemas.messages import History
from relaygr.schemas.partitioner import murmur2, partition_for
from tests.schemas.wire_samples import HEADERS, HISTORIES, MESSAGES, PARTITION_COUNTS, REFUSED, USER_IDS

FILE = Path(__file__).parents[2] / "schemas" / "relaygr" / "schemas" / "vectors" / "wire.json"


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


def write(path: Path, ours: dict[str, Any]) -> int:
    """Writes the vectors, and returns 0; or returns 1, if an entry that the file has would change or go."""
    earlier = json.loads(path.read_text(encoding="utf-8"))
    now = [entry for entries in ours.values() if isinstance(entries, list) for entry in entries]
    lost = [
        f"{section}: {json.dumps(entry, ensure_ascii=False)[:120]}"
        for section, entries in earlier.items()
        if isinstance(entries, list)
        for entry in entries
        if entry not in now
    ]
    for line in lost:
        sys.stderr.write(f"would change or remove {line}\n")
    if lost:
        sys.stderr.write(
            f"{path.name} was not written: deployed programs send these bytes. For a change that the rules in "
            "relaygr.schemas.codec allow, delete the line from the file first.\n"
        )
        return 1
    text = "{\n" + ",\n".join(_lines(name, value) for name, value in ours.items()) + "\n}\n"
    path.write_text(text, encoding="utf-8")
    return 0


def _lines(name: str, value: object) -> str:
    """One entry a line, so that a change shows as the lines that it changes."""
    if not isinstance(value, list):
        return f'"{name}": {json.dumps(value)}'
    rows = ",\n".join(json.dumps(entry, ensure_ascii=False) for entry in value)
    return f'"{name}": [\n{rows}\n]'


if __name__ == "__main__":
    sys.exit(write(FILE, vectors()))
