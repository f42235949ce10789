"""`relaygr topics`: creates the topics, compares them with the catalogue, prints the rights (ACLs) on them, and shows
dead letters.
"""

from __future__ import annotations

import enum
import json
import re
import shlex
from dataclasses import asdict
from typing import Annotated

import typer
import yaml
from rich.table import Table
from rich.text import Text

from relaygr.cli.options import BootstrapOption, ConfigOption, JsonOption, SetOption, command_settings
from relaygr.cli.texts import print_json, printable, show_size, stdout_console, time_text
from relaygr.cluster.admin import check_topics, create_topics
from relaygr.cluster.rights import Role, rights_of
from relaygr.cluster.topic_check import Severity, TopicReport, TopicRow
from relaygr.kafka.dead_letters import read_dead_letters
from relaygr.kafka.settings import KafkaSettings
from relaygr.runtime.errors import RelayError
from relaygr.schemas.topics import Topic

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Create or check the topics; show dead letters; print rights."
)

_STYLES = {Severity.ERROR: "red", Severity.WARNING: "yellow", Severity.NOTE: "dim"}


@app.command()
def create(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Change nothing; report what would be created.")] = False,
    repair: Annotated[bool, typer.Option("--repair", help="Also correct the settings of existing topics.")] = False,
    as_json: JsonOption = False,
    config: ConfigOption = None,
    bootstrap: BootstrapOption = None,
    overrides: SetOption = None,
) -> None:
    """Create the missing topics. Existing topics are kept, so the command can be run again.

    Exits with 0 if all topics match the catalogue (or would, with --dry-run), else with 1.
    """
    settings = command_settings(config, bootstrap, overrides)
    report = create_topics(settings, dry_run=dry_run, repair=repair)
    _show(report, settings, as_json, "to create" if dry_run else "created")
    raise typer.Exit(0 if report.ok or dry_run else 1)


@app.command()
def check(
    workers: Annotated[
        int | None, typer.Option(min=1, help="Number of workers that will share the partitions.", show_default=False)
    ] = None,
    as_json: JsonOption = False,
    config: ConfigOption = None,
    bootstrap: BootstrapOption = None,
    overrides: SetOption = None,
) -> None:
    """Compare the cluster's topics with the catalogue. Exits with 1 if a process would refuse to start with them."""
    settings = command_settings(config, bootstrap, overrides)
    report = check_topics(settings, workers)
    _show(report, settings, as_json, "created")
    raise typer.Exit(0 if report.ok else 1)


@app.command("dead-letters")
def dead_letters(
    last: Annotated[int, typer.Option("--last", min=1, max=10_000, help="How many, the newest.")] = 20,
    as_json: JsonOption = False,
    config: ConfigOption = None,
    bootstrap: BootstrapOption = None,
    overrides: SetOption = None,
) -> None:
    """Show the newest messages that no process could use, and why. Needs Read on the dead-letter topic.

    Keys are shown only with the setting dead_letter_bodies: without it dead letters have no byte of the message.
    """
    settings = command_settings(config, bootstrap, overrides)
    found, kept = read_dead_letters(settings, last)
    if as_json:
        print_json([asdict(each) for each in found])
        return
    console = stdout_console()
    for each in found:
        size = "no value" if each.value_bytes is None else show_size(each.value_bytes)
        console.print(
            f"{time_text(each.written_at_ms)} {printable(each.topic)}[{each.partition}]@{each.offset} {size}"
            + ("" if each.key is None else f", key {printable(each.key)}")
        )
        console.print(f"  {printable(each.reason)}: {printable(each.detail)}")
    topic = settings.topic(Topic.DEAD_LETTERS)
    console.print(f"{len(found):,} of {kept:,} dead letters in {topic} at {settings.bootstrap}")


class AclForm(enum.StrEnum):
    """The form of the printed rights."""

    KAFKA_ACLS = "kafka-acls"
    STRIMZI = "strimzi"


@app.command()
def acls(
    role: Annotated[Role, typer.Option(help="What the user's processes do.")],
    principal: Annotated[str, typer.Option(metavar="User:NAME", help="Kafka's name of the user.")],
    form: Annotated[
        list[AclForm] | None,
        typer.Option("--as", help="kafka-acls.sh commands, or a KafkaUser of Strimzi.", show_default="both"),
    ] = None,
    config: ConfigOption = None,
    bootstrap: BootstrapOption = None,
    overrides: SetOption = None,
) -> None:
    """Print the commands that give a user the least rights of a role. Changes nothing, and needs no broker."""
    settings = command_settings(config, bootstrap, overrides)
    if not principal.startswith("User:") or principal == "User:":
        raise RelayError(f"--principal {principal}: write User:NAME, such as User:worker.")
    forms = form or list(AclForm)
    if AclForm.KAFKA_ACLS in forms:
        typer.echo(_acl_commands(role, principal, settings))
    if AclForm.STRIMZI in forms:
        typer.echo(("---\n" if len(forms) > 1 else "") + _strimzi_user(role, principal, settings), nl=False)


def _acl_commands(role: Role, principal: str, kafka: KafkaSettings) -> str:
    """The `kafka-acls.sh` commands that give the rights to a principal, such as User:x."""
    lines = []
    for right in rights_of(role, kafka):
        operations = " ".join(f"--operation {operation}" for operation in right.operations)
        lines.append(
            f"kafka-acls.sh --bootstrap-server {shlex.quote(kafka.bootstrap)} --command-config admin.properties --add "
            f"--allow-principal {shlex.quote(principal)} {operations} --{right.resource} {shlex.quote(right.name)}"
        )
    return "\n".join(lines)


def _strimzi_user(role: Role, principal: str, kafka: KafkaSettings) -> str:
    """A KafkaUser of Strimzi with the rights, as YAML."""
    login = principal.removeprefix("User:")
    common_name = re.search(r"CN=([^,]+)", login)
    name = re.sub(r"[^a-z0-9.-]+", "-", (common_name[1] if common_name else login).lower()).strip("-.")
    acls = [
        {
            "resource": {"type": right.resource.value, "name": right.name, "patternType": "literal"},
            "operations": list(right.operations),
        }
        for right in rights_of(role, kafka)
    ]
    user = {
        "apiVersion": "kafka.strimzi.io/v1beta2",
        "kind": "KafkaUser",
        "metadata": {"name": name, "labels": {"strimzi.io/cluster": "my-cluster"}},
        "spec": {
            "authentication": {"type": "tls" if common_name else "scram-sha-512"},
            "authorization": {"type": "simple", "acls": acls},
        },
    }
    return yaml.safe_dump(user, sort_keys=False)


def _show(report: TopicReport, kafka: KafkaSettings, as_json: bool, created: str) -> None:
    if as_json:
        typer.echo(json.dumps({"bootstrap": kafka.bootstrap, "ok": report.ok, **asdict(report)}, indent=2))
        return
    table = Table(title=f"Topics at {kafka.bootstrap}", title_justify="left")
    table.add_column("topic", no_wrap=True)
    table.add_column("partitions", justify="right")
    table.add_column("wanted", justify="right")
    table.add_column("state")
    for row in report.rows:
        found = "-" if row.partitions is None else str(row.partitions)
        table.add_row(row.name, found, str(row.wanted_partitions), _state(row, created))
    console = stdout_console()
    console.print(table)
    for finding in report.findings:
        text = f"{finding.severity}: {finding.what}" + (f". To fix: {finding.mend}" if finding.mend else "")
        console.print(text, style=_STYLES[finding.severity])


def _state(row: TopicRow, created: str) -> str | Text:
    if row.created:
        return created
    if row.partitions is None:
        return Text("missing", style="red")
    return "exists" if row.partitions == row.wanted_partitions else Text("other count", style="red")
