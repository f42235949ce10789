"""What some version makes of a file of wire vectors, and its settings: printed as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from relaygr.schemas import DecodeError, decode, messages
from relaygr.schemas.json_messages import to_json
from relaygr.schemas.vectors import wire_file
from relaygr.settings import Settings


def read(kind: str, wire: str) -> object:
    """The fields of a message, or the reason why it is refused."""
    try:
        return to_json(decode(getattr(messages, kind), bytes.fromhex(wire)))
    except DecodeError as error:
        return error.reason.value


def main() -> None:
    theirs = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    known = {
        "vectors": wire_file(),
        "messages": [read(entry["kind"], entry["wire"]) for entry in theirs["messages"]],
        "refused": [read(entry["kind"], entry["wire"]) for entry in theirs["refused"]],
        "settings": Settings().model_dump(mode="json", exclude_none=True),
    }
    sys.stdout.write(json.dumps(known))


if __name__ == "__main__":
    main()
