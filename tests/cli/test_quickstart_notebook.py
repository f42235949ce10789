"""docs/quickstart.ipynb runs from top to bottom, and shows what it printed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = json.loads((Path(__file__).parents[2] / "docs" / "quickstart.ipynb").read_text(encoding="utf-8"))
CELLS: list[Any] = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]
TIMEOUT_S = 400


def printed() -> str:
    """What the committed notebook shows as text."""
    return "".join("".join(output.get("text", "")) for cell in CELLS for output in cell["outputs"])


def paths_in(text: str) -> dict[str, str]:
    """The path of each user's request."""
    return dict(re.findall(r"^(\w+): ranked, (\w+), [\d.]+ ms$", text, re.MULTILINE))


def test_the_outputs_are_those_of_one_run_from_top_to_bottom_and_name_no_place_of_a_machine() -> None:
    assert [cell["execution_count"] for cell in CELLS] == list(range(1, len(CELLS) + 1))
    assert {output["output_type"] for cell in CELLS for output in cell["outputs"]} == {"stream", "display_data"}
    assert [output["name"] for cell in CELLS for output in cell["outputs"] if "name" in output].count("stderr") == 0
    assert re.findall(r"\x1b|(?:^|[\s:'\"])/\w+/\S*", printed()) == []
    assert paths_in(printed()).items() >= {("anna", "full"), ("ben", "hbm")}


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S + 60)
def test_the_notebook_runs_and_leaves_nothing(tmp_path: Path) -> None:
    script = "\n".join("".join(cell["source"]) for cell in CELLS)
    (tmp_path / "notebook.py").write_text(script, encoding="utf-8")
    folder = tmp_path / "folder"
    folder.mkdir()
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith("RELAYGR_")},
        "MPLBACKEND": "Agg",
        "OMP_NUM_THREADS": "1",
        "TMPDIR": str(folder),
    }
    with (tmp_path / "said").open("w+", encoding="utf-8") as said:
        process = subprocess.Popen(
            [sys.executable, "notebook.py"],
            cwd=tmp_path,
            env=environment,
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(TIMEOUT_S)
            assert code == 0, (tmp_path / "said").read_text(encoding="utf-8")[-6000:]
            with pytest.raises(ProcessLookupError):  # Trigger and worker have ended, too.
                os.killpg(process.pid, 0)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    ran = paths_in((tmp_path / "said").read_text(encoding="utf-8"))
    assert ran["anna"] == "full"
    assert ran["ben"] in ("hbm", "pending")
    assert list(folder.iterdir()) == []
