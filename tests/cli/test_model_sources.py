"""`relaygr model deploy` from a registry or from object storage: the same revision, and what serves if it is away."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import fsspec
import pytest
from fsspec.asyn import get_loop
from typer.testing import CliRunner, Result

from relaygr.cli.app import app
from relaygr.worker.model.checkpoint import load_checkpoint, random_checkpoint, save_checkpoint, verify_checkpoint
from relaygr.worker.model.inputs.known import read_action_names, write_action_names
from tests.worlds.model import small_config

BUCKET = "memory://bucket/ranker"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    save_checkpoint(folder, small_config(), random_checkpoint(small_config(), 1).tensors)
    return folder


@pytest.fixture
def bucket(checkpoint: Path) -> Iterator[fsspec.AbstractFileSystem]:
    files = fsspec.filesystem("memory")
    files.put(str(checkpoint), "/bucket/ranker", recursive=True)
    yield files
    files.rm("/bucket", recursive=True)


def deploy(source: str, folder: Path, *options: str) -> Result:
    return CliRunner().invoke(app, ["model", "deploy", source, str(folder), "--calibrate-at-start", *options])


def said(result: Result) -> str:
    return " ".join(result.output.split())


def serving(folder: Path) -> str:
    return load_checkpoint(folder / "current").revision


@pytest.mark.usefixtures("bucket")
def test_a_checkpoint_in_object_storage_serves_with_its_revision_and_its_digests_are_trusted(
    tmp_path: Path, checkpoint: Path
) -> None:
    assert deploy(BUCKET, tmp_path / "served").exit_code == 0
    assert serving(tmp_path / "served") == load_checkpoint(checkpoint).revision
    assert verify_checkpoint(tmp_path / "served" / "current", trust=False).is_trusted
    mode = (tmp_path / "served" / "current").resolve().stat().st_mode
    assert mode & 0o777 == checkpoint.stat().st_mode & 0o777, "a worker of another user can read it"
    assert {path.name for path in (tmp_path / "served").iterdir()} == {"current", serving(tmp_path / "served")}


@pytest.mark.usefixtures("bucket")
def test_a_bucket_has_the_files_that_a_folder_has(tmp_path: Path, checkpoint: Path) -> None:
    """Without the names of its actions a model would take any names, with any codes."""
    write_action_names(checkpoint, {"seen": 4, "saved": 9})
    (checkpoint / "README.md").write_text("# Ranker of March\n")
    fsspec.filesystem("memory").put(f"{checkpoint}/", "/bucket/ranker/", recursive=True)
    assert deploy(BUCKET, tmp_path / "served").exit_code == 0
    assert read_action_names(tmp_path / "served" / "current") == {"seen": 4, "saved": 9}
    assert deploy(str(checkpoint), tmp_path / "other").exit_code == 0
    assert contents(tmp_path / "served" / "current") == contents(tmp_path / "other" / "current")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_an_optional_file_that_a_reader_may_not_look_for_is_not_there(
    tmp_path: Path, bucket: fsspec.AbstractFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S3 says 403 of a missing file to a reader who may not list the bucket."""
    info = type(bucket).info

    def refuse(self: fsspec.AbstractFileSystem, path: str, **options: object) -> object:
        if not self.exists(path):
            raise PermissionError("Forbidden")
        return info(self, path, **options)

    monkeypatch.setattr(type(bucket), "exists", lambda self, path, **_: path.strip("/") in str(self.find("/bucket")))
    monkeypatch.setattr(type(bucket), "info", refuse)
    assert deploy(BUCKET, tmp_path / "served").exit_code == 0
    bucket.rm("/bucket/ranker/config.json")
    assert "cannot be read: PermissionError: Forbidden" in said(deploy(BUCKET, tmp_path / "served"))


@pytest.mark.usefixtures("bucket")
def test_a_place_without_a_checkpoint_is_named_with_what_is_in_it(tmp_path: Path) -> None:
    result = deploy("memory://bucket", tmp_path / "served")
    assert result.exit_code == 1 and "memory://bucket has no config.json: it has ranker." in said(result)


def test_an_error_about_a_copy_names_its_source(tmp_path: Path, bucket: fsspec.AbstractFileSystem) -> None:
    """The copy is gone when the sentence is read."""
    bucket.pipe("/bucket/ranker/config.json", b"[3]")
    result = deploy(BUCKET, tmp_path / "served")
    assert result.exit_code == 1 and f"{BUCKET}/config.json" in said(result)
    assert ".fetched" not in result.output


@pytest.fixture(scope="module")
def http() -> None:
    """fsspec keeps the thread of its connections for the rest of the process."""
    get_loop()


@contextmanager
def server(status: int, *, endless: bool = False) -> Iterator[str]:
    """An HTTP server that answers so to everything."""

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if not endless:
                return self.send_error(status)
            self.do_HEAD()
            with suppress(OSError):
                while True:
                    self.wfile.write(bytes(1 << 20))

        def do_HEAD(self) -> None:
            if not endless:
                return self.send_error(status)
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as serving:
        thread = threading.Thread(target=serving.serve_forever, args=(0.05,))
        thread.start()
        yield f"http://127.0.0.1:{serving.server_port}/ranker"
        serving.shutdown()
        thread.join()


@pytest.mark.usefixtures("http")
@pytest.mark.parametrize(
    ("status", "sentence"),
    [
        (404, " does not exist."),
        (403, " cannot be read: ClientResponseError: 403"),
        (503, " cannot be read: ClientResponseError: 503"),
    ],
)
def test_a_server_that_does_not_answer_well_is_no_missing_checkpoint(
    tmp_path: Path, status: int, sentence: str
) -> None:
    with server(status) as url:
        assert f"{url}{sentence}" in said(deploy(url, tmp_path / "served"))


@pytest.mark.usefixtures("http")
def test_an_answer_without_an_end_in_place_of_the_configuration_is_refused(tmp_path: Path) -> None:
    with server(200, endless=True) as url:
        assert "its config.json has more than 16 MiB" in said(deploy(url, tmp_path / "served"))
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_that_is_larger_than_the_disk_leaves_nothing_on_it(
    small_disk: Path, bucket: fsspec.AbstractFileSystem
) -> None:
    bucket.pipe("/bucket/ranker/README.md", bytes(9 << 20))
    result = deploy(BUCKET, small_disk / "served")
    assert result.exit_code == 1 and f"{BUCKET} cannot be read: OSError: " in said(result)
    assert "No space left on device" in said(result)
    assert list(small_disk.iterdir()) == []


def test_weights_that_were_changed_in_the_store_are_refused(tmp_path: Path, bucket: fsspec.AbstractFileSystem) -> None:
    weights = bytearray(bucket.cat("/bucket/ranker/model.safetensors"))
    weights[-1] ^= 1
    bucket.pipe("/bucket/ranker/model.safetensors", bytes(weights))
    result = deploy(BUCKET, tmp_path / "served", "--keep-current")
    assert result.exit_code == 1 and "differ" in said(result)
    assert not (tmp_path / "served").exists()


def test_a_checkpoint_that_is_replaced_while_it_is_fetched_is_refused(
    tmp_path: Path, bucket: fsspec.AbstractFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    get_file = type(bucket).get_file

    def get_and_replace(self: fsspec.AbstractFileSystem, source: str, *arguments: object, **options: object) -> None:
        get_file(self, source, *arguments, **options)
        self.pipe(source, self.cat(source))

    monkeypatch.setattr(type(bucket), "get_file", get_and_replace)
    result = deploy(BUCKET, tmp_path / "served")
    assert result.exit_code == 1 and "was replaced while it was read" in said(result)


def test_without_the_store_the_deployed_revision_serves_and_the_command_says_so(
    tmp_path: Path, bucket: fsspec.AbstractFileSystem
) -> None:
    served = tmp_path / "served"
    deploy(BUCKET, served)
    revision = serving(served)
    bucket.rm("/bucket/ranker/config.json")
    for options, code in (((), 1), (("--keep-current",), 0)):
        result = deploy(BUCKET, served, *options)
        assert result.exit_code == code
        assert "has no config.json" in said(result) and f"{revision}, which was deployed before, serves" in said(result)
    assert serving(served) == revision
    result = deploy(BUCKET, tmp_path / "other", "--keep-current")
    assert result.exit_code == 1, "there is nothing to keep"


def test_a_file_url_names_a_folder_with_a_space_as_path_writes_it_and_a_missing_one_does_not_exist(
    tmp_path: Path, checkpoint: Path
) -> None:
    mounted = checkpoint.rename(tmp_path / "model store")
    url, served = mounted.as_uri(), tmp_path / "served"
    assert url.endswith("model%20store")
    assert deploy(url, served).exit_code == 0
    mounted.rename(tmp_path / "gone")
    result = deploy(url, served, "--keep-current")
    assert result.exit_code == 0 and f"does not exist. {serving(served)}, which was deployed before" in said(result)


@pytest.mark.usefixtures("bucket")
def test_a_calibration_is_asked_for_at_the_source(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["model", "deploy", BUCKET, str(tmp_path / "served")])
    assert result.exit_code == 1 and f"{BUCKET} has no calibration.json" in said(result)


def test_an_unknown_scheme_is_an_error_though_a_revision_serves(tmp_path: Path, checkpoint: Path) -> None:
    deploy(str(checkpoint), tmp_path / "served")
    result = deploy("bucket://ranker", tmp_path / "served", "--keep-current")
    assert result.exit_code == 1 and "Protocol not known: bucket" in said(result)


DEPLOY = ("-m", "relaygr.cli", "model", "deploy")
REGISTER = """
import sys, mlflow

client = mlflow.MlflowClient()
run = client.create_run(client.create_experiment("ranker")).info.run_id
client.log_artifacts(run, sys.argv[1], "checkpoint")
client.create_registered_model("ranker")
client.create_model_version("ranker", f"runs:/{run}/checkpoint", run)
client.set_registered_model_alias("ranker", "champion", "1")
for epoch in ("007", "012"):
    client.log_artifacts(run, sys.argv[1], f"sweep/{epoch}")
print(run)
"""


@pytest.mark.slow
def test_a_version_of_mlflow_s_registry_serves_by_its_alias_and_by_its_run(tmp_path: Path, checkpoint: Path) -> None:
    pytest.importorskip("mlflow")
    # A registry needs a server, or this store of files, of which MLflow warns.
    environment = os.environ | {
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "MLFLOW_TRACKING_URI": (tmp_path / "store").as_uri(),
    }

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *command], env=environment, capture_output=True, text=True, timeout=120, check=False
        )

    def deployed(source: str, *options: str) -> str:
        served = str(tmp_path / "served")
        done = run(*DEPLOY, source, served, "--calibrate-at-start", *options)
        assert done.returncode == 0, done.stderr
        return " ".join((done.stdout + done.stderr).split())

    run_id = run("-c", REGISTER, str(checkpoint)).stdout.strip().splitlines()[-1]
    revision = load_checkpoint(checkpoint).revision
    for source in ("models:/ranker@champion", f"runs:/{run_id}/checkpoint", f"runs:/{run_id}/sweep/012"):
        output = deployed(source)
        assert output.startswith(f"{revision} serves from"), "MLflow's bars would stand before it"
        assert serving(tmp_path / "served") == revision
    refused = run(*DEPLOY, f"runs:/{run_id}/sweep/", str(tmp_path / "other"), "--calibrate-at-start")
    assert refused.returncode == 1
    complaint = f"runs:/{run_id}/sweep/ has 2 checkpoints: 007, 012. Name one, such as runs:/{run_id}/sweep/007."
    assert complaint in " ".join(refused.stderr.split())
    shutil.rmtree(tmp_path / "store")
    assert f"{revision}, which was deployed before, serves" in deployed("models:/ranker@champion", "--keep-current")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("http://bea:Hush3d@127.0.0.1:1/ranker", "http://***@127.0.0.1:1/ranker cannot be read: ClientConnectorError"),
        ("http://127.0.0.1:1/ranker?X-Amz-Signature=Hush3d", "127.0.0.1:1/ranker?*** cannot be read: ClientConnector"),
        ("models:/ranker/4", "models:/ranker/4 cannot be read: MlflowException: API request to http://***@127.0.0.1:1"),
    ],
)
def test_no_secret_of_an_address_is_shown_while_its_server_is_away(tmp_path: Path, source: str, shown: str) -> None:
    if source.startswith("models:"):
        pytest.importorskip("mlflow")
    environment = os.environ | {
        "MLFLOW_TRACKING_URI": "http://bea:Hush3d@127.0.0.1:1/flow",
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    }
    command = [sys.executable, "-m", "relaygr.cli", "model", "deploy", source, str(tmp_path / "served")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert shown in " ".join(done.stderr.split())
    assert "Hush3d" not in done.stdout + done.stderr
