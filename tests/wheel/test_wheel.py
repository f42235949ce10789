"""The wheel in a gateway that has packages `schemas`, `streams` and `workers` of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from relaygr.kafka.settings import KafkaSettings
from relaygr.schemas import __version__
from relaygr.ui import server as ui_server
from tests.echo_worker import echo_worker
from tests.wheel.wheel_world import Environment, finish

pytestmark = pytest.mark.slow

GATEWAY = """
import json
import sys

import schemas.orders
import streams.clicks
import workers.mail

import relaygr.client
from relaygr.client import RelayClient
from relaygr.settings import load_settings

settings = load_settings(overrides=sys.argv[1:])
with RelayClient(settings, "gw-0", settings.client) as client:
    event = client.publish_retrieval(
        "ann", ranking_budget_ms=5000, expected_ranking_in_ms=10, expected_candidates=3, expected_suffix=0
    )
    outcome = client.rank("ann", [7, 8, 9], budget_ms=10_000, request_id=event.request_id)
    client.drain(10)
print(json.dumps({
    "status": outcome.status,
    "scores": outcome.result.scores.tolist(),
    "version": relaygr.client.__version__,
    "place": relaygr.client.__file__,
    "own": [schemas.orders.OWNER, streams.clicks.OWNER, workers.mail.OWNER],
}))
"""
TYPED_USER = """\
from relaygr.admission.policy import OwnerView
from relaygr.client import RankOutcome, RelayClient
from relaygr.kafka.settings import KafkaSettings
from relaygr.schemas import Other, RankingResult, Reason
from relaygr.settings import load_settings

settings: KafkaSettings = load_settings()
client = RelayClient(settings, "gw-0")
outcome: RankOutcome = client.rank("ann", [1, 2], budget_ms=50)
result: RankingResult | None = outcome.result
reason: Reason | Other | None = result.reason if result is not None else None
client.rank("ann", [1, 2], budget_ms=50, budget=50)
"""


@pytest.fixture
def gateway(tmp_path: Path) -> Path:
    """The gateway's program, beside packages whose names are those of folders in our checkout."""
    for package, module in (("schemas", "orders"), ("streams", "clicks"), ("workers", "mail")):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
        (tmp_path / package / f"{module}.py").write_text("OWNER = 'gateway'\n", encoding="utf-8")
    program = tmp_path / "gateway.py"
    program.write_text(GATEWAY, encoding="utf-8")
    return program


@pytest.mark.parametrize("broker", ["embedded"], indirect=True)
def test_a_gateway_with_packages_of_the_same_names_publishes_and_ranks(
    kafka_settings: KafkaSettings, installed: Environment, gateway: Path
) -> None:
    names = ("bootstrap", "topic_prefix", "group_prefix", "partitions", "fetch_wait_max_ms")
    overrides = [f"{name}={getattr(kafka_settings, name)}" for name in names]
    with echo_worker(kafka_settings) as worker:
        seen = json.loads(finish(installed.start(gateway, *overrides)))
    assert (seen["status"], seen["scores"]) == ("ranked", [7.0, 8.0, 9.0])
    assert seen["own"] == ["gateway"] * 3
    assert Path(seen["place"]).is_relative_to(installed.packages)
    assert seen["version"] == __version__
    assert [request.user_id for request in worker.seen] == ["ann"]


def test_the_wheel_installs_one_name(wheel: Path) -> None:
    tops = {name.partition("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert tops == {"relaygr", f"relaygr-{__version__}.dist-info"}


def test_the_wheel_has_every_file_of_the_live_page(wheel: Path) -> None:
    folder = "relaygr/ui/static/"
    shipped = {name.removeprefix(folder) for name in zipfile.ZipFile(wheel).namelist() if name.startswith(folder)}
    assert shipped == {path.name for path in (Path(ui_server.__file__).parent / "static").iterdir()}


def test_every_package_of_the_wheel_says_that_it_is_typed(installed: Environment) -> None:
    packages = [
        path for path in (installed.packages / "relaygr").iterdir() if path.is_dir() and path.name != "__pycache__"
    ]
    assert [path.name for path in packages if not (path / "py.typed").is_file()] == []
    assert (installed.packages / "relaygr" / "py.typed").is_file(), "modules that lie directly in the namespace"


def test_mypy_takes_the_types_of_the_installed_wheel(installed: Environment, tmp_path: Path) -> None:
    (tmp_path / "user.py").write_text(TYPED_USER, encoding="utf-8")
    (tmp_path / "mypy.ini").write_text("[mypy]\n", encoding="utf-8")
    command = [sys.executable, "-m", "mypy", "--python-executable", str(installed.python), "--strict", "user.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=tmp_path)
    errors = [line for line in done.stdout.splitlines() if "error:" in line]
    assert len(errors) == 1, done.stdout + done.stderr
    assert errors[0].startswith('user.py:12: error: Unexpected keyword argument "budget"')
