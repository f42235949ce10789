"""Standard streams that are closed when a process starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import os, sys
from relaygr.runtime.standard_streams import open_closed_streams
open_closed_streams()
store = os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY)
print("a line")
print(sys.stdin.read(), file=sys.stderr, flush=True)
for number in (1, 2):
    os.write(number, b"a line of a library")
os.write(store, b"records")
"""


def test_no_file_gets_the_number_of_a_standard_stream_that_is_closed(tmp_path: Path) -> None:
    store = tmp_path / "store"
    command = [sys.executable, "-c", SCRIPT, str(store)]
    done = subprocess.run(command, timeout=60, check=False, preexec_fn=lambda: os.closerange(0, 3))
    assert done.returncode == 0 and store.read_bytes() == b"records"
