"""Files of `torch.save` with another pickle than torch writes."""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path

import torch


def rewrite_pickle(path: Path, content: bytes, is_legacy: bool = False) -> None:
    """A file of torch whose object is `content`."""
    if is_legacy:
        torch.save({}, path, _use_new_zipfile_serialization=False)
        path.write_bytes(path.read_bytes().replace(pickle.dumps({}, protocol=2), content))
        return
    plain = path.with_name("plain")
    torch.save({"w": torch.zeros(2)}, plain)
    with zipfile.ZipFile(plain) as tensors, zipfile.ZipFile(path, "w") as changed:
        for name in tensors.namelist():
            changed.writestr(name, content if name.endswith("data.pkl") else tensors.read(name))
    plain.unlink()
