"""The commands of a docs page, in a shell, as a reader types them in."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path


def type_in(script: str, folder: Path, environment: Mapping[str, str], timeout_s: float) -> str:
    """Runs the script in the folder, where it leaves `*.log`. Returns what it prints; fails if one of its lines does.

    `environment`: beside the present one, of which settings of relaygr are left out.
    """
    # A failed line ends the shell, which then ends what it started.
    (folder / "page.sh").write_text(
        f"trap 'kill -9 -- $(jobs -p | sed s/^/-/) 2>&- || :' EXIT\n{script}", encoding="utf-8"
    )
    whole = {
        **{key: value for key, value in os.environ.items() if not key.startswith("RELAYGR_")},
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        **environment,
    }
    # Not a pipe, which orphans of a killed worker keep open for a minute.
    said = folder / "page.out"
    with said.open("w") as output:
        done = subprocess.run(
            ["bash", "-e", "-m", "page.sh"], cwd=folder, env=whole, stdin=subprocess.DEVNULL,
            stdout=output, stderr=subprocess.STDOUT, timeout=timeout_s, check=False,
        )  # fmt: skip
    printed = said.read_text(encoding="utf-8")
    logs = "".join(log.read_text(encoding="utf-8")[-2000:] for log in folder.glob("*.log"))
    assert done.returncode == 0, printed[-6000:] + logs
    return printed
