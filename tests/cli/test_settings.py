"""Settings: four layers that refuse unknown names; errors name the key, its origin and the allowed values."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from relaygr.admission.scenarios import ScenarioSettings
from relaygr.cli.app import app
from relaygr.processes import write_config
from relaygr.runtime.errors import RelayError
from relaygr.schemas.topics import Topic
from relaygr.settings import (
    DEFAULT_ORIGIN,
    LoadedSettings,
    Settings,
    apart_from_secrets,
    load,
    setting_fields,
    size_text,
    values,
)
from relaygr.settings_reference import FIRST, reference

PAGE = Path(__file__).parents[2] / "docs" / "settings.md"
GIB = 1024**3


def from_yaml(tmp_path: Path, text: str) -> LoadedSettings:
    file = tmp_path / "relaygr.yaml"
    file.write_text(text, encoding="utf-8")
    return load(file, {})


def test_each_layer_overrides_the_one_below(tmp_path: Path) -> None:
    file = tmp_path / "relaygr.yaml"
    file.write_text("worker: {threads: 2, page_tokens: 32, chunk_ms: 1}\n", encoding="utf-8")
    environment = {"RELAYGR_WORKER__PAGE_TOKENS": "128", "RELAYGR_WORKER__CHUNK_MS": "2"}
    loaded = load(file, environment, ["worker.chunk_ms=3"])
    worker = loaded.settings.worker
    assert (worker.threads, worker.page_tokens, worker.chunk_ms) == (2, 128, 3.0)
    assert loaded.origin("worker.threads") == str(file)
    assert loaded.origin("worker.page_tokens") == "RELAYGR_WORKER__PAGE_TOKENS"
    assert loaded.origin("worker.chunk_ms") == "--set"
    assert loaded.origin("worker.device") == DEFAULT_ORIGIN


def test_bootstrap_on_the_command_line_wins() -> None:
    loaded = load(None, {"RELAYGR_BOOTSTRAP": "one:9092"}, ["bootstrap=two:9092"], bootstrap="three:9092")
    assert loaded.settings.bootstrap == "three:9092"
    assert loaded.origin("bootstrap") == "--bootstrap"


def test_of_two_values_on_the_command_line_the_later_wins() -> None:
    assert load(None, {}, ["partitions=8", "partitions=16"]).settings.partitions == 16


def test_every_setting_has_one_variable() -> None:
    fields = setting_fields()
    assert len({field.variable for field in fields.values()}) == len(fields)
    assert fields["worker.hbm_bytes"].variable == "RELAYGR_WORKER__HBM_BYTES"


def test_every_default_can_be_read_back_by_key() -> None:
    assert values(load(None, {}).settings).keys() == setting_fields().keys()


@pytest.mark.parametrize(
    ("text", "size_bytes"), [("2GiB", 2 * GIB), ("1.5 GiB", 3 * GIB // 2), ("2000000", 2_000_000), ("2GB", 2 * 10**9)]
)
def test_sizes_have_units(text: str, size_bytes: int) -> None:
    assert load(None, {}, [f"worker.hbm_bytes={text}"]).settings.worker.hbm_bytes == size_bytes


@pytest.mark.parametrize("text", ["none", "null", ""])
def test_what_may_be_none_can_be_unset(text: str, tmp_path: Path) -> None:
    file = tmp_path / "relaygr.yaml"
    file.write_text("worker: {device: cuda}\n", encoding="utf-8")
    assert load(file, {}).settings.worker.device == "cuda"
    assert load(file, {"RELAYGR_WORKER__DEVICE": text}).settings.worker.device is None


def test_an_empty_file_and_an_empty_section_change_nothing(tmp_path: Path) -> None:
    assert from_yaml(tmp_path, "").settings == load(None, {}).settings
    assert from_yaml(tmp_path, "worker:\n").settings == load(None, {}).settings


@pytest.mark.parametrize("ending", ["\n", "\r\n", "\n\n"])
def test_a_variable_from_a_secret_that_was_made_from_a_file_is_without_its_line_break(ending: str) -> None:
    given = {
        "RELAYGR_SECURITY__PROTOCOL": "SASL_PLAINTEXT",
        "RELAYGR_SECURITY__SASL_MECHANISM": "PLAIN",
        "RELAYGR_SECURITY__SASL_USERNAME": "shop",
        "RELAYGR_SECURITY__SASL_PASSWORD": "two words ",
        "RELAYGR_GATEWAY__TOKEN": "0123456789abcdef",
        "RELAYGR_WORKER__THREADS": "3",
    }
    settings = load(None, {name: value + ending for name, value in given.items()}).settings
    assert settings == load(None, given).settings
    assert settings.security.sasl_password is not None and settings.gateway.token is not None
    assert settings.security.sasl_password.get_secret_value() == "two words "
    assert settings.gateway.token.get_secret_value() == "0123456789abcdef"


def test_a_value_may_hold_an_equals_sign() -> None:
    given = ["security.protocol=SASL_SSL", "security.sasl_mechanism=PLAIN", "security.sasl_username=a"]
    password = load(None, {}, [*given, "security.sasl_password=a=b"]).settings.security.sasl_password
    assert password is not None
    assert password.get_secret_value() == "a=b"


INJECTED = {
    "RELAYGR_PORT": "tcp://10.0.0.1:9309",
    "RELAYGR_SERVICE_HOST": "10.0.0.1",
    "RELAYGR_SERVICE_PORT": "9309",
    "RELAYGR_SERVICE_PORT_HTTP": "9309",
    "RELAYGR_PORT_9309_TCP": "tcp://10.0.0.1:9309",
    "RELAYGR_PORT_9309_TCP_ADDR": "10.0.0.1",
    "RELAYGR_TRIGGER_PORT": "udp://10.0.0.1:9",
    "RELAYGR_TRIGGER_SERVICE_HOST": "10.0.0.1",
    "RELAYGR_TRIGGER_SERVICE_PORT_METRICS": "80",
    "RELAYGR_MY_LAG_PORT_80_TCP_PROTO": "tcp",
    "RELAYGR_DNS_PORT_53_UDP_PORT": "53",
}


def test_variables_that_kubernetes_injects_for_a_service_are_left_alone() -> None:
    """Every process refused to start in a namespace with a Service named `relaygr`."""
    assert load(None, INJECTED).origins == {}


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("RELAYGR_PORT", "9309"),
        ("RELAYGR_TRIGGER_HTTP_PORT", "9309"),
        ("RELAYGR_SERVICE", "x"),
        ("RELAYGR_PORT_X", "1"),
    ],
)
def test_a_variable_that_only_looks_like_one_of_kubernetes_is_refused(variable: str, value: str) -> None:
    with pytest.raises(RelayError, match=f"{variable} is not a setting"):
        load(None, {variable: value})


def test_variables_of_the_test_suite_and_of_others_are_left_alone() -> None:
    others = {"RELAYGR_TEST_BOOTSTRAP": "x", "KAFKA_HOME": "/opt/kafka", "MY_RELAYGR_THING": "1", "relaygr_x": "1"}
    assert load(None, others).origins == {}


UNKNOWN: dict[str, tuple[dict[str, str], list[str], str]] = {
    "misspelt on the command line": (
        {},
        ["worker.hbm_byte=1"],
        r"worker\.hbm_byte \(--set\) is not a setting\. Did you mean worker\.hbm_bytes\?",
    ),
    "another unit": ({}, ["worker.chunk_s=1"], r"Did you mean worker\.chunk_ms\?"),
    "a part of its name": ({}, ["ui.port=1"], r"Did you mean ui\.http_port\?"),
    "without its section": ({}, ["page_tokens=1"], r"Did you mean worker\.page_tokens\?"),
    "like nothing": ({}, ["zzzzz=1"], r"zzzzz \(--set\) is not a setting\. `relaygr settings` lists all"),
    "a section": ({}, ["worker=1"], r"worker \(--set\) is not a setting"),
    "a misspelt variable": (
        {"RELAYGR_WORKER__HBM_BYTE": "1"},
        [],
        r"variable RELAYGR_WORKER__HBM_BYTE is not a setting\. Did you mean RELAYGR_WORKER__HBM_BYTES\?",
    ),
    "a variable with one underscore": ({"RELAYGR_WORKER_THREADS": "1"}, [], r"Did you mean RELAYGR_WORKER__THREADS\?"),
    "a variable in lower case": ({"RELAYGR_worker__threads": "1"}, [], "is not a setting"),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_name_is_an_error_with_a_suggestion(name: str) -> None:
    environment, overrides, text = UNKNOWN[name]
    with pytest.raises(RelayError, match=text):
        load(None, environment, overrides)


BAD_FILES: dict[str, tuple[str, str]] = {
    "unknown key": ("worker:\n  thread: 2\n", r"worker\.thread \(.*relaygr\.yaml\).*Did you mean worker\.threads\?"),
    "unknown section": ("workers:\n  threads: 2\n", r"workers \(.*\) is not a setting"),
    "dotted key": ("worker.threads: 2\n", r"worker\.threads \(.*\) is not a setting"),
    "scalar for a section": ("worker: 2\n", "worker .* is a section"),
    "a list": ("- worker\n", "must hold `key: value` lines, not a list"),
    "no YAML": ("partitions: 1\nworker: {threads\n", r"relaygr\.yaml is not YAML: .*, line 3"),
    "a key given twice": ("partitions: 1\npartitions: 2\n", "partitions is given twice"),
    "a key that is no word": ("[1, 2]: 3\n", "a key must be a word"),
    "wrong type": ("worker:\n  threads: many\n", r"worker\.threads = 'many' \(.*relaygr\.yaml\): .*valid integer"),
    "a map for a value": ("worker:\n  threads: {a: 1}\n", r"worker\.threads"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_broken_file_is_refused_with_the_place(name: str, tmp_path: Path) -> None:
    text, message = BAD_FILES[name]
    with pytest.raises(RelayError, match=message):
        from_yaml(tmp_path, text)


def test_a_file_that_is_not_there_is_said_by_name(tmp_path: Path) -> None:
    with pytest.raises(RelayError, match=r"nowhere\.yaml cannot be read: No such file"):
        load(tmp_path / "nowhere.yaml", {})


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "relaygr.yaml"
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(RelayError, match="not UTF-8"):
        load(file, {})


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("worker.chunk_ms=-1", r"worker\.chunk_ms = '-1' \(--set\): input should be greater than 0"),
        ("worker.chunk_ms=nan", "finite"),
        ("worker.chunk_ms=5ms", "valid number"),
        ("worker.hbm_bytes=2QiB", "QiB"),
        ("worker.hbm_bytes=1KiB", "greater than or equal to 1048576"),
        ("worker.worker_id=a b", "should match pattern"),
        ("affinity=new", "'range', 'consumer_protocol' or 'one_topic'"),
        ("topic_prefix=a/b", "use 1 to 100 of a-z"),
        ("partitions", "write --set KEY=VALUE"),
        ("security.protocol=SASL_SSL", r"needs sasl_mechanism.*given: security\.protocol \(--set\)"),
    ],
)
def test_a_value_out_of_bounds_is_refused_with_what_is_allowed(override: str, text: str) -> None:
    with pytest.raises(RelayError, match=text):
        load(None, {}, [override])


def test_all_wrong_values_are_said_at_once() -> None:
    with pytest.raises(RelayError) as caught:
        load(None, {"RELAYGR_PARTITIONS": "0"}, ["worker.threads=0"])
    assert len(str(caught.value).splitlines()) == 2


def test_a_secret_is_never_shown() -> None:
    given = {"RELAYGR_SECURITY__SASL_PASSWORD": "hunter2"}
    with pytest.raises(RelayError) as caught:
        load(None, given)
    assert "hunter2" not in str(caught.value)
    assert "RELAYGR_SECURITY__SASL_PASSWORD" in str(caught.value)


@pytest.mark.parametrize(
    "override",
    [
        "security.sasl_pasword=hunter2",
        "security.sasl_pasword: hunter2",
        "security.sasl_password hunter2",
        "sasl_password hunter2=",
        "hunter2",
        "security.sasl_password:hun=ter2",
    ],
)
def test_a_secret_in_a_misspelt_override_is_not_shown(override: str) -> None:
    with pytest.raises(RelayError) as caught:
        load(None, {}, [override])
    assert "hun" not in str(caught.value)


def test_secrets_for_a_child_are_in_the_environment_and_not_in_its_command() -> None:
    given = ["partitions=4", "security.sasl_password=a=b", "security.sasl_username=me"]
    plain, secrets = apart_from_secrets(given)
    assert plain == ["partitions=4", "security.sasl_username=me"]
    assert secrets == {"RELAYGR_SECURITY__SASL_PASSWORD": "a=b"}


def test_a_broken_file_does_not_show_its_secrets(tmp_path: Path) -> None:
    with pytest.raises(RelayError) as caught:
        from_yaml(tmp_path, "security: {sasl_password: hunter2\n")
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("size_bytes", "text"), [(0, "0B"), (1000, "1000B"), (1024, "1KiB"), (3 * GIB // 2, "1536MiB"), (GIB, "1GiB")]
)
def test_a_size_is_shown_as_it_can_be_written(size_bytes: int, text: str) -> None:
    assert size_text(size_bytes) == text
    assert load(None, {}, [f"worker.dram_bytes={text}"]).settings.worker.dram_bytes == size_bytes


def test_the_committed_page_is_what_the_classes_generate() -> None:
    assert PAGE.read_text(encoding="utf-8") == reference(), (
        "run: python -m relaygr.settings_reference > docs/settings.md"
    )


def test_the_help_names_the_settings_that_come_first() -> None:
    shown = " ".join(CliRunner().invoke(app, ["settings", "--help"], env={"COLUMNS": "200"}).output.split())
    assert [key for key in FIRST if key.removeprefix("worker.") not in shown] == []


def test_a_supervisor_gives_its_children_secrets_in_the_environment_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other users can read the command line of a process."""
    variable = "RELAYGR_SECURITY__SASL_PASSWORD"
    monkeypatch.setenv(variable, "")
    monkeypatch.delenv(variable)
    commands: list[list[str]] = []

    def supervise(settings: object, make_command: Callable[[int, bool], Sequence[str]]) -> int:
        commands.append([*make_command(3, True)])
        return 0

    monkeypatch.setattr("relaygr.cli.worker._supervise", supervise)
    given = ["protocol=SASL_SSL", "sasl_mechanism=PLAIN", "sasl_username=me", "sasl_password=hunter2"]
    arguments = [part for each in given for part in ("--set", f"security.{each}")]
    assert CliRunner().invoke(app, ["worker", "--standby", *arguments]).exit_code == 0
    assert "security.sasl_username=me" in commands[0]
    assert "hunter2" not in " ".join(commands[0])
    assert os.environ[variable] == "hunter2"


def lines(*words: str) -> list[str]:
    done = CliRunner().invoke(app, ["settings", *words])
    assert done.exit_code == 0, done.output
    return done.output.splitlines()


SCENARIOS = """
topic_prefix: shop
worker: {model: models/home}
scenarios:
  home: {share: 3, budget_ms: 50}
  ads:
    topic_prefix: shop-ads
    model: models/ads
    budget_ms: 30
    variants: {b: {users: 0.1, model: models/ads-b}}
"""


def test_a_child_reads_the_scenarios_that_its_parent_wrote(tmp_path: Path) -> None:
    scenarios = {
        "home": ScenarioSettings(share=2, budget_ms=40),
        "ads": ScenarioSettings(topic_prefix="shop-ads", model=tmp_path, budget_ms=25),
    }
    written = Settings(topic_prefix="shop", scenarios=scenarios)
    file = tmp_path / "settings.yaml"
    write_config(written, file)
    assert load(file, {}).settings.scenarios == scenarios
    ads = load(file, {}, ["scenario=ads"]).settings
    assert (ads.topic_prefix, ads.history_prefix, ads.traffic.budget_ms) == ("shop-ads", "shop", 25)
    # A process that is started from the settings of another one of the same scenario has the same settings.
    write_config(ads, file)
    assert load(file, {}).settings == ads


TABLES_AND_LISTS = """
topic_settings: {dead-letters: {retention.ms: 86400000, max.message.bytes: null}, behaviours: {segment.bytes: 14680064}}
client: {model_revisions: [a1, b2]}
ui: {scrape: ["http://trigger-0:9100/metrics"]}
worker: {hbm_bytes: 3MiB}
security: {protocol: SASL_PLAINTEXT, sasl_mechanism: PLAIN, sasl_username: u, sasl_password: "pass: word"}
"""


def test_a_child_reads_each_table_and_list_that_its_parent_wrote(tmp_path: Path) -> None:
    """`topic_settings` ended the demo in a traceback, and a list became a text."""
    written = from_yaml(tmp_path, TABLES_AND_LISTS).settings
    write_config(written, tmp_path / "child.yaml")
    assert load(tmp_path / "child.yaml", {}).settings == written


def test_tables_and_lists_are_shown_as_they_can_be_written(tmp_path: Path) -> None:
    loaded = from_yaml(tmp_path, TABLES_AND_LISTS)
    file = str(tmp_path / "relaygr.yaml")
    shown = dict(line.split(maxsplit=1) for line in lines("--config", file))
    for key in ("topic_settings", "client.model_revisions", "ui.scrape"):
        text = shown[key].rsplit(maxsplit=1)[0]
        assert values(load(None, {}, [f"{key}={text}"]).settings)[key] == values(loaded.settings)[key]
    as_json = json.loads("".join(lines("--config", file, "--json")))
    assert as_json["topic_settings"]["value"]["behaviours"] == {"segment.bytes": "14680064"}
    assert as_json["ui.scrape"]["value"] == ["http://trigger-0:9100/metrics"]
    assert "pass: word" not in str(as_json)


def test_without_a_scenario_a_process_serves_those_on_its_topics(tmp_path: Path) -> None:
    settings = from_yaml(tmp_path, SCENARIOS).settings
    assert settings.served.keys() == {"default", "home"}
    assert settings.topic(Topic.RANKING) == "shop.ranking"


@pytest.mark.parametrize(
    ("name", "prefix", "model"),
    [("ads", "shop-ads", "models/ads"), ("ads/b", "shop-ads-b", "models/ads-b"), ("home", "shop", "models/home")],
)
def test_a_scenario_names_topics_groups_and_model_and_shares_the_histories(
    name: str, prefix: str, model: str, tmp_path: Path
) -> None:
    loaded = from_yaml(tmp_path, f"{SCENARIOS}\nscenario: {name}\n")
    settings = loaded.settings
    assert settings.topic(Topic.RANKING) == f"{prefix}.ranking"
    assert settings.topic(Topic.HISTORY) == "shop.history"
    assert settings.topic(Topic.BEHAVIOURS) == "shop.behaviours"
    assert settings.worker.model == Path(model)
    if prefix != "shop":
        assert settings.workers_group == f"{prefix}.workers"
        assert settings.served.keys() == {"ads"}
        assert settings.traffic.budget_ms == 30
        assert loaded.origin("worker.model") == f"scenario {name}"


def test_the_command_line_overrides_a_scenario_but_not_its_topics_and_groups(tmp_path: Path) -> None:
    file = tmp_path / "relaygr.yaml"
    file.write_text(SCENARIOS, encoding="utf-8")
    settings = load(file, {"RELAYGR_TOPIC_PREFIX": "other"}, ["scenario=ads", "worker.model=here"]).settings
    assert settings.worker.model == Path("here")
    assert settings.topic(Topic.RANKING) == "shop-ads.ranking"
    assert settings.topic(Topic.HISTORY) == "other.history"
    assert settings.workers_group == "shop-ads.workers"


@pytest.mark.parametrize(
    "scenarios",
    [
        "ads: {topic_prefix: shop, model: models/ads}",
        "ads: {topic_prefix: shop-ads, model: models/a}\n  news: {topic_prefix: shop-ads, model: models/b}",
        "ads: {topic_prefix: x, model: m, variants: {b: {users: 1, model: v}}}\n  news: {topic_prefix: x-b, model: v}",
    ],
)
def test_a_prefix_that_two_models_would_share_is_refused(scenarios: str, tmp_path: Path) -> None:
    with pytest.raises(RelayError, match="give it a topic_prefix of its own"):
        from_yaml(tmp_path, f"topic_prefix: shop\nscenarios:\n  {scenarios}\n")


@pytest.mark.parametrize("name", ["news", "ads/d"])
def test_an_unknown_scenario_is_refused_with_those_that_exist(name: str, tmp_path: Path) -> None:
    with pytest.raises(RelayError, match=f"scenario = {name}: .*(the settings have ads, home|it has b)"):
        from_yaml(tmp_path, f"{SCENARIOS}\nscenario: {name}\n")


def test_every_setting_has_a_meaning() -> None:
    assert [key for key, found in setting_fields().items() if not found.info.description] == []


def printed(*words: str) -> list[str]:
    return [line.split()[0] for line in lines(*words)]


def test_a_section_is_printed_alone() -> None:
    everything, trigger = printed(), printed("trigger")
    assert trigger == [key for key in everything if key.startswith("trigger.")]
    assert printed("worker.hbm_bytes") == ["worker.hbm_bytes"]


def test_an_unknown_section_is_answered_with_those_that_there_are() -> None:
    done = CliRunner().invoke(app, ["settings", "work"])
    assert done.exit_code == 1 and "worker" in done.output
