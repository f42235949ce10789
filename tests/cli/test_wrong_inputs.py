"""Wrong inputs of commands: each ends with a sentence that says what to do, and with an exit code above 0."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from relaygr.cli.app import app

NOWHERE = "127.0.0.1:1"
CASES: dict[str, tuple[str, str]] = {
    "no broker": (f"lag --bootstrap {NOWHERE}", "--bootstrap"),
    "no settings file": ("settings --config /nonexist.yaml", "--config needs a YAML file"),
    "a folder as settings": ("settings --config {folder}", "--config needs a YAML file"),
    "no settings in it": ("settings --config {text}", "must hold `key: value` lines"),
    "unknown setting": ("settings --set worker.hbm=1", "is not a setting"),
    "no value": ("settings --set worker.hbm_bytes", "--set KEY=VALUE"),
    "a setting without a value": ("settings --set ui.port", "Did you mean ui.http_port?"),
    "a group without a name": ("lag --group=", "--group names no group"),
    "not a size": ("settings --set worker.hbm_bytes=many", "512MiB"),
    "not a truth": ("settings --set tracing.enabled=perhaps", "true or false"),
    "below the bound": ("settings --set partitions=0", "greater than or equal to 1"),
    "unknown choice": ("settings --set security.protocol=banana", "'SASL_SSL'"),
    "a policy that is gone": ("settings --set trigger.policy=never", "set trigger.enabled to false"),
    "unknown scenario": ("settings --set scenario=nope", "add it to `scenarios`"),
    "a port out of range": ("lag serve --port 99999", "65535"),
    "a gateway's port": ("gateway --port 99999", "65535"),
    "a page's port": ("ui --port 99999", "65535"),
    "an open gateway": ("gateway --host 0.0.0.0", "set gateway.token"),
    "unknown broker": ("demo --broker banana", "kafka"),
    "no checkpoint": ("model verify /nonexist", "relaygr model init"),
    "no previous revision": ("model rollback {folder}", "relaygr model deploy"),
    "no such worker": ("cache show worker-77", "Start it"),
    "no calibration": ("simulate run --calibration /nonexist", "relaygr calibrate"),
    "not a calibration": ("simulate run --calibration {text}", "relaygr calibrate"),
    "no records": ("simulate learn /nonexist --calibration /nonexist --out o", "relaygr traffic --out"),
    "no length": ("size --calibration {text} --length abc --users 9 --qps 1 --slo-ms 50", "--length abc: write"),
    "no folder to write in": (
        "calibrate --model /nonexist --out {text}/c.json",
        "--out {text}/c.json cannot be written",
    ),
    "no folder for the records": ("traffic --out {text}/r.jsonl", "--out {text}/r.jsonl cannot be written"),
    "a folder as the file of records": ("traffic --out {folder}", "--out {folder} cannot be written"),
    "no folder for the figures": (
        "simulate run --calibration /nonexist --json {text}/f.json",
        "--json {text}/f.json cannot be written",
    ),
    "no folder for a plan": (
        "simulate plan --calibration /nonexist --json {text}/p.json --qps 1",
        "--json {text}/p.json cannot be written",
    ),
    "no folder for a report": (
        "model convert /nonexist {folder}/m --from meta --report {text}/r",
        "--report {text}/r cannot be written",
    ),
    "no folder for item ids": (
        "publish history --dry-run --interactions {text} --item-map {text}/i.csv",
        "--item-map {text}/i.csv cannot be written",
    ),
    "unknown command": ("banana", "No such command"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_wrong_input_ends_with_a_sentence_that_says_what_to_do(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    text = tmp_path / "text"
    text.write_text("x\n")
    command, remedy = CASES[case]
    done = CliRunner().invoke(app, command.format(folder=tmp_path, text=text).split())
    assert done.exit_code > 0
    assert isinstance(done.exception, SystemExit), done.exception
    assert remedy.format(text=text, folder=tmp_path) in done.output
    assert "Traceback" not in done.output and "errors.pydantic.dev" not in done.output


@pytest.mark.parametrize("given", ["[red]x[/red]", ":abc:"])
def test_what_was_given_stands_in_the_error_as_it_is(given: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["simulate", "run", "--calibration", f"/nonexist/{given}"], env={"COLUMNS": "200"})
    assert f"/nonexist/{given} " in done.output.replace("\n", " ")


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("model deploy ftp://bea:Hush3d@127.0.0.1:1/ranker {folder}", "ftp://***@127.0.0.1:1/ranker cannot be read"),
        ("model deploy ftp://bea:Hush3d/x@127.0.0.1:1/ranker {folder}", "ftp://***@127.0.0.1:1/ranker cannot be read"),
        ("model deploy memory://ranker?versionId=Hush3d {folder}", "memory://ranker?*** does not exist"),
        ("model deploy bucket://bea:Hush3d@ranker {folder}", "bucket://***@ranker cannot be read"),
        ("lag --bootstrap SASL_SSL://bea:Hush3d@kafka:9093", "'SASL_SSL://***@kafka:9093' is not an address"),
        ("lag --set bootstrap=bea:Hush3d@kafka:9093", "'***@kafka:9093' is not an address"),
        ("ui --scrape bea:Hush3d@trigger:9100", "--scrape ***@trigger:9100: write the address"),
        ("ui --scrape http://bea:Hush3d@trigger:9100/metrics", "--scrape http://***@trigger:9100/metrics: write"),
        (
            "settings worker --set worker.metrics_url=ftp://bea:Hush3d@w/metrics",
            "worker.metrics_url = 'ftp://***@w/metrics'",
        ),
    ],
)
def test_an_address_with_a_secret_is_named_without_it(
    command: str, shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    done = CliRunner().invoke(app, command.format(folder=tmp_path / "served").split())
    assert done.exit_code > 0 and isinstance(done.exception, SystemExit), done.exception
    assert shown in " ".join(done.output.split())
    assert "Hush3d" not in done.output


@pytest.mark.parametrize("options", ["", "--json"])
def test_the_settings_are_listed_without_the_secrets_of_addresses(options: str) -> None:
    pages = "ui.scrape=['http://h:9100/metrics?token=Hush3d']"
    login = "schema_registry.username=bea", "schema_registry.password=Hush3d"
    given = [word for setting in (pages, *login) for word in ("--set", setting)]
    done = CliRunner().invoke(app, ["settings", *options.split(), *given])
    assert done.exit_code == 0 and "http://h:9100/metrics?***" in done.output
    assert "Hush3d" not in done.output
