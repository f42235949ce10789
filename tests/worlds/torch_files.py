"""Files of `torch.save` with another pickle than torch writes."""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from pathlib import Path

import torch


def rewrite_pickle(path: Path, content: bytes, is_legacy: bool = False) -> None:
    """A file of torch whose object is `content`."""
    if is_legacy:
        torch.save({}, path, _use_new_zipfile_serialization=False)
        path.write_bytes(path.read_bytes().replace(pickle.dumps({}, protocol=2), content))
        return
    archive(path, {**records(), "data.pkl": content})


def records() -> dict[str, bytes]:
    """The records of an archive of torch with a tensor of two numbers."""
    saved = io.BytesIO()
    torch.save({"w": torch.zeros(2)}, saved)
    with zipfile.ZipFile(saved) as tensors:
        return {name.removeprefix("archive/"): tensors.read(name) for name in tensors.namelist()}


def archive(path: Path, records: dict[str, bytes], *, compression: int = zipfile.ZIP_STORED) -> None:
    """An archive of these records, in this order."""
    with zipfile.ZipFile(path, "w", compression) as changed:
        for name, content in records.items():
            changed.writestr(f"archive/{name}", content)


def with_two_directories(path: Path, shown: dict[str, bytes], read: dict[str, bytes]) -> None:
    """An archive that is `shown` to readers that look for the directory before its end, as Python does, and `read` to
    those that go where the end says, as torch does. The names are the same, and `read` is the longer one.
    """
    parts = []
    for each in (read, shown):
        archive(path, each)
        size, start = struct.unpack("<II", path.read_bytes()[-10:-2])
        parts.append((path.read_bytes()[:start], bytearray(path.read_bytes()[start : start + size])))
    (read_records, read_directory), (shown_records, shown_directory) = parts
    moved, at = len(read_records) - len(shown_records), 0
    while at < len(shown_directory):
        # Python adds the distance between both directories to each place.
        (place,) = struct.unpack_from("<I", shown_directory, at + 42)
        struct.pack_into("<I", shown_directory, at + 42, place + moved)
        at += 46 + sum(struct.unpack_from("<3H", shown_directory, at + 28))
    archive(path, read)
    end = path.read_bytes()[-22:]
    path.write_bytes(read_records + read_directory + shown_records + shown_directory + end)
