"""`relaygr model deploy` and `rollback`: which revision serves, in one step."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from relaygr.cli.app import app
from relaygr.schemas.messages import LatencyCoefficients
from relaygr.settings import CALIBRATION_FILE
from relaygr.worker.calibration import Calibration, MachineDescription, load_calibration, save_calibration
from relaygr.worker.kv import KvDtype
from relaygr.worker.model.checkpoint import load_checkpoint, random_checkpoint, save_checkpoint
from relaygr.worker.model.inputs.known import read_action_names, write_action_names
from relaygr.worker.model.options import ComputeDtype
from tests.worlds.disk import fill
from tests.worlds.model import small_config

COEFFICIENTS = LatencyCoefficients(0, 10, 0, 0, 10, 0, 0, 10, 0, 0, 0)


@pytest.fixture
def checkpoints(tmp_path: Path) -> list[Path]:
    folders = []
    for seed in (1, 2):
        folder = tmp_path / f"checkpoint-{seed}"
        saved = save_checkpoint(folder, small_config(), random_checkpoint(small_config(), seed).tensors)
        save_calibration(calibration_of(saved.revision), folder / CALIBRATION_FILE)
        folders.append(folder)
    return folders


def calibration_of(revision: str) -> Calibration:
    machine = MachineDescription(revision, "cpu", "-", "-", 1, "-", KvDtype.FLOAT32, 16, ComputeDtype.FLOAT32, "torch")
    return Calibration(machine, "2026-01-01T00:00:00Z", COEFFICIENTS, (), (), (), ())


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


def test_a_calibration_that_a_full_disk_does_not_take_leaves_the_one_before_and_no_part_of_its_own(
    small_disk: Path, checkpoints: list[Path]
) -> None:
    served, source = small_disk / "served", checkpoints[1]
    assert run("deploy", source, served)[0] == 0
    known = load_calibration(served / "current" / CALIBRATION_FILE)
    host = "h" * 300_000
    save_calibration(replace(known, machine=replace(known.machine, host=host)), source / CALIBRATION_FILE)
    fill(small_disk)
    code, said = run("deploy", source, served)
    assert code == 1 and "No space left" in said
    assert load_calibration(served / "current" / CALIBRATION_FILE) == known
    assert not list((served / "current").glob(".*"))


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


def test_a_revision_without_a_calibration_is_refused_with_the_command_that_makes_it(
    tmp_path: Path, checkpoints: list[Path]
) -> None:
    """A running worker would refuse it, with a line in its log."""
    (checkpoints[0] / CALIBRATION_FILE).unlink()
    code, said = run("deploy", checkpoints[0], tmp_path / "served")
    assert code == 1 and "relaygr calibrate --model" in said and "--calibrate-at-start" in said
    assert not (tmp_path / "served").exists()
    code, said = run("deploy", checkpoints[0], tmp_path / "served", "--calibrate-at-start")
    assert code == 0 and revision_of(checkpoints[0]) in said


def test_the_calibration_of_another_revision_is_refused(tmp_path: Path, checkpoints: list[Path]) -> None:
    shutil.copy(checkpoints[0] / CALIBRATION_FILE, checkpoints[1] / CALIBRATION_FILE)
    code, said = run("deploy", checkpoints[1], tmp_path / "served", "--calibrate-at-start")
    assert code == 1 and "was measured with revision" in said
    assert not (tmp_path / "served").exists()


def test_a_later_calibration_of_a_deployed_revision_replaces_the_one_before(
    tmp_path: Path, checkpoints: list[Path]
) -> None:
    run("deploy", checkpoints[0], tmp_path / "served")
    later = replace(calibration_of(revision_of(checkpoints[0])), measured_at="2026-02-02T00:00:00Z")
    save_calibration(later, checkpoints[0] / CALIBRATION_FILE)
    code, _ = run("deploy", checkpoints[0], tmp_path / "served")
    assert code == 0
    assert load_calibration(tmp_path / "served" / "current" / CALIBRATION_FILE).measured_at == later.measured_at


def test_a_revision_that_is_deployed_again_gets_what_came_beside_its_weights_since(
    tmp_path: Path, checkpoints: list[Path]
) -> None:
    served = tmp_path / "served"
    run("deploy", checkpoints[1], served)
    for names in ({"play": 2}, {"play": 2, "skip": 5}):
        write_action_names(checkpoints[1], names)
        assert run("deploy", checkpoints[1], served)[0] == 0
        assert read_action_names(served / "current") == names
    assert run("deploy", served / "current", served)[0] == 0
    assert {path.name for path in (served / "current").iterdir()} == {path.name for path in checkpoints[1].iterdir()}


def test_a_checkpoint_that_is_replaced_while_it_is_copied_is_not_deployed(
    tmp_path: Path, checkpoints: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    copy, folder = shutil.copytree, tmp_path / "deployed"

    def replace_and_copy(source: Path, target: Path) -> None:
        for file in checkpoints[1].iterdir():
            shutil.copy2(file, source / file.name)
        copy(source, target)

    monkeypatch.setattr(shutil, "copytree", replace_and_copy)
    done = CliRunner().invoke(app, ["model", "deploy", str(checkpoints[0]), str(folder)])
    assert done.exit_code != 0
    assert "was replaced while it was copied" in " ".join(done.output.split())
    assert not folder.exists()


def test_a_failure_leaves_no_empty_folder(
    tmp_path: Path, checkpoints: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(shutil, "copytree", no_room)
    served = tmp_path / "new" / "served"
    code, said = run("deploy", checkpoints[0], served)
    assert code == 1 and "no space left" in said and not served.exists()
    code, _ = run("deploy", "file:///nowhere/at/all", served)
    assert code == 1 and not served.exists()
