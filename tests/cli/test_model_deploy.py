"""`relaygr model deploy` and `rollback`: which revision serves, in one step."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from relaygr.cli.app import app
from relaygr.worker.model.checkpoint import load_checkpoint, random_checkpoint, save_checkpoint
from tests.worlds.model import small_config


@pytest.fixture
def checkpoints(tmp_path: Path) -> list[Path]:
    folders = []
    for seed in (1, 2):
        folder = tmp_path / f"checkpoint-{seed}"
        save_checkpoint(folder, small_config(), random_checkpoint(small_config(), seed).tensors)
        folders.append(folder)
    return folders


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["model", *map(str, arguments)])
    return result.exit_code, result.output


def revision_of(folder: Path) -> str:
    return load_checkpoint(folder).revision


def test_the_revision_that_was_deployed_last_serves_and_a_rollback_brings_back_the_one_before(
    tmp_path: Path, checkpoints: list[Path]
) -> None:
    served = tmp_path / "served"
    first, second = (revision_of(checkpoint) for checkpoint in checkpoints)
    for checkpoint, revision in zip(checkpoints, (first, second), strict=True):
        code, said = run("deploy", checkpoint, served)
        assert code == 0 and revision in said
        assert revision_of(served / "current") == revision
    for expected in (first, second):
        code, said = run("rollback", served)
        assert code == 0 and expected in said
        assert revision_of(served / "current") == expected


def test_a_copy_loads_without_being_read_again(tmp_path: Path, checkpoints: list[Path]) -> None:
    run("deploy", checkpoints[0], tmp_path / "served")
    original, copy = (folder / "model.safetensors" for folder in (checkpoints[0], tmp_path / "served" / "current"))
    assert original.stat().st_mtime_ns == copy.stat().st_mtime_ns


def test_the_same_revision_again_keeps_the_way_back(tmp_path: Path, checkpoints: list[Path]) -> None:
    served = tmp_path / "served"
    for checkpoint in (*checkpoints, checkpoints[1]):
        run("deploy", checkpoint, served)
    run("rollback", served)
    assert revision_of(served / "current") == revision_of(checkpoints[0])


def test_without_a_previous_revision_nothing_changes(tmp_path: Path, checkpoints: list[Path]) -> None:
    served = tmp_path / "served"
    run("deploy", checkpoints[0], served)
    code, said = run("rollback", served)
    assert code == 1 and "no previous revision" in said
    assert revision_of(served / "current") == revision_of(checkpoints[0])
    assert {path.name for path in served.iterdir()} == {"current", revision_of(checkpoints[0])}, (
        "nothing is left behind"
    )


def test_what_is_no_checkpoint_is_not_deployed(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    code, _ = run("deploy", tmp_path / "empty", tmp_path / "served")
    assert code == 1
    assert not (tmp_path / "served").exists()
