"""All settings in one typed object, with the origin of each value.

Four layers; a later layer overrides an earlier one:

    default < YAML file (`--config`) < environment (`RELAYGR_...`) < command line (`--set`, `--bootstrap`)

The setting `scenario` names the scenario of a process. The scenario's own values override those of the file, such as
`topic_prefix` and `worker.model`, but not those of the environment and the command line.

A setting has a dotted key (`worker.hbm_bytes`) and a variable (`RELAYGR_WORKER__HBM_BYTES`). The layers are merged key
by key. An unknown name is an error in every layer, except variables that begin with `RELAYGR_TEST_` (the test suite's)
and those that Kubernetes injects for a Service whose name begins with `relaygr`. Every error is a `RelayError` that
names the key, its origin and the allowed values; it never contains a secret.
"""

from __future__ import annotations

import difflib
import functools
import os
import re
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python

from relaygr.admission.scenarios import (
    NAME,
    Deployment,
    ScenarioName,
    Scenarios,
    ScenarioSettings,
    deployment_of,
    require_few,
    served_by,
)
from relaygr.admission.settings import AdmissionSettings
from relaygr.client.settings import ClientSettings
from relaygr.consumer.settings import ConsumerSettings
from relaygr.gateway.settings import GatewaySettings
from relaygr.ingest.settings import RegistrySettings
from relaygr.kafka.settings import KafkaSettings
from relaygr.lag.settings import LagSettings
from relaygr.runtime.errors import RelayError
from relaygr.runtime.masking import masked
from relaygr.runtime.settings import LogSettings
from relaygr.tracing import TracingSettings
from relaygr.traffic.settings import TrafficSettings
from relaygr.trigger.settings import TriggerSettings
from relaygr.ui.settings import UiSettings
from relaygr.worker.settings import WorkerSettings
from relaygr.worker.supervisor.policy import SupervisorSettings

__all__ = ["Settings", "load_settings"]

ENV_PREFIX = "RELAYGR_"
TEST_ENV_PREFIX = "RELAYGR_TEST_"
DEFAULT_ORIGIN = "default"
CALIBRATION_FILE = "calibration.json"
"""Beside the model of a scenario: the calibration of its workers."""
_SERVICE_VARIABLE = re.compile(
    r"RELAYGR(_[A-Z0-9_]+)?_(SERVICE_HOST|SERVICE_PORT(_[A-Z0-9_]+)?|PORT_[0-9]+_(TCP|UDP)(_(PROTO|PORT|ADDR))?)"
)
_KEY = re.compile(r"^[\w.]+")
_OF_EACH_SCENARIO = ("topic_prefix", "group_prefix", "history_prefix")
"""What a scenario with a prefix sets, whatever else is given: topics and groups of two scenarios would mix."""


class Settings(KafkaSettings):
    """The root: Kafka's settings at the top level, and a section for each part of the system."""

    scenario: str | None = Field(
        None,
        pattern=f"^{NAME}(/{NAME})?$",
        description="SCENARIO or SCENARIO/VARIANT of this process: the entry of `scenarios` whose topics, groups and "
        "model it uses; none: those of the scenarios without a topic_prefix",
    )
    scenarios: dict[ScenarioName, ScenarioSettings] = Field(
        {}, description="the scenarios by name, such as `{home: {share: 2}, ads: {budget_ms: 30}}` (docs/deploying.md)"
    )
    log: LogSettings = LogSettings()
    client: ClientSettings = ClientSettings()
    consumer: ConsumerSettings = ConsumerSettings()
    admission: AdmissionSettings = AdmissionSettings()
    trigger: TriggerSettings = TriggerSettings()
    worker: WorkerSettings = WorkerSettings()
    supervisor: SupervisorSettings = SupervisorSettings()
    gateway: GatewaySettings = GatewaySettings()
    traffic: TrafficSettings = TrafficSettings()
    lag: LagSettings = LagSettings()
    ui: UiSettings = UiSettings()
    tracing: TracingSettings = TracingSettings()
    schema_registry: RegistrySettings = RegistrySettings()

    @field_validator("scenarios")
    @classmethod
    def _scenarios_are_few(cls, value: dict[str, ScenarioSettings]) -> dict[str, ScenarioSettings]:
        return require_few(value)

    @model_validator(mode="after")
    def _prefixes_belong_to_one_model(self) -> Settings:
        owners: dict[str, tuple[Path | None, str]] = {}
        if self.scenario is None:
            # Else the prefix of these settings is that of the scenario.
            owners[self.topic_prefix] = None, "topic_prefix"
        for name, scenario in self.scenarios.items():
            for full_name in (name, *(f"{name}/{variant}" for variant in scenario.variants)):
                found = deployment_of(self.scenarios, full_name)
                if found.topic_prefix is None:
                    continue
                model, owner = owners.setdefault(found.topic_prefix, (found.model, full_name))
                shares_it = model == found.model and owner != "topic_prefix" and "/" not in owner + full_name
                if owner != full_name and not shares_it:
                    raise ValueError(
                        f"scenario {full_name} has the prefix {found.topic_prefix!r} of {owner}, but another model or "
                        "other users: give it a topic_prefix of its own"
                    )
        return self

    @property
    def deployment(self) -> Deployment | None:
        """The topics, groups and model of `scenario`; None without one. Raises RelayError for an unknown scenario."""
        if self.scenario is None:
            return None
        try:
            return deployment_of(self.scenarios, self.scenario)
        except ValueError as error:
            raise RelayError(f"scenario = {self.scenario}: {error}.") from error

    @property
    def served(self) -> Scenarios:
        """The scenarios whose messages come on the topics of this process."""
        return served_by(self.scenarios, self.deployment)


@dataclass(frozen=True, slots=True)
class SettingField:
    """One setting: its dotted key and its field."""

    key: str
    info: FieldInfo

    @property
    def variable(self) -> str:
        """The setting's environment variable."""
        return ENV_PREFIX + self.key.replace(".", "__").upper()

    @property
    def secret(self) -> bool:
        return SecretStr in union_members(self.info.annotation)

    def parse(self, text: str) -> Any:
        """Parses a text from the command line or a variable. The value is validated later.

        A line break at its end is no part of it: a Secret of Kubernetes that was made from a file has one.
        """
        text = text.rstrip("\r\n")
        members = union_members(self.info.annotation)
        if type(None) in members and text.lower() in ("", "none", "null"):
            return None
        if any(typing.get_origin(member) is not None for member in members):
            return yaml.load(text, _StrictLoader)
        return text


@dataclass(frozen=True, slots=True)
class LoadedSettings:
    """Validated settings, and by key the origin of each value that is not a default."""

    settings: Settings
    origins: Mapping[str, str]

    def origin(self, key: str) -> str:
        return self.origins.get(key, DEFAULT_ORIGIN)


@dataclass(frozen=True, slots=True)
class _Given:
    """A value from one layer, with its origin."""

    value: Any
    origin: str


def load_settings(
    config: Path | str | None = None,
    *,
    bootstrap: str | None = None,
    overrides: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Settings:
    """Loads the settings from a YAML file, the environment and `KEY=VALUE` overrides. Raises RelayError.

    `bootstrap` overrides the address from all of them. `environment` is by default the environment of this process.
    """
    variables = os.environ if environment is None else environment
    return load(None if config is None else Path(config), variables, overrides, bootstrap).settings


def load(
    config: Path | None,
    environment: Mapping[str, str],
    overrides: Sequence[str] = (),
    bootstrap: str | None = None,
) -> LoadedSettings:
    """Merges the layers, validates the result, and records the origin of each value. Raises RelayError.

    `overrides` are `KEY=VALUE` texts. `bootstrap` stands for `bootstrap=...` and overrides them.
    """
    given: dict[str, _Given] = {}
    if config is not None:
        given.update(_from_file(config))
    given.update(_from_environment(environment))
    given.update(_from_command_line(overrides))
    if bootstrap is not None:
        given["bootstrap"] = _Given(bootstrap, "--bootstrap")
    try:
        settings = _validated(given)
        own = _of_scenario(settings)
        if own:
            first = _from_environment(environment) | _from_command_line(overrides)
            given.update({key: entry for key, entry in own.items() if key in _OF_EACH_SCENARIO or key not in first})
            settings = _validated(given)
    except ValidationError as error:
        raise RelayError(_explain(error, given)) from None
    return LoadedSettings(settings, {key: entry.origin for key, entry in given.items()})


def _validated(given: Mapping[str, _Given]) -> Settings:
    return Settings.model_validate(_nest({key: entry.value for key, entry in given.items()}))


def _of_scenario(settings: Settings) -> dict[str, _Given]:
    """The values that the process's scenario sets in other sections."""
    deployment = settings.deployment
    if deployment is None:
        return {}
    scenario = settings.scenarios[deployment.scenario]
    prefix = deployment.topic_prefix
    own: dict[str, Any] = {
        "topic_prefix": prefix,
        "group_prefix": prefix,
        # Histories belong to users, so all scenarios read the same ones.
        "history_prefix": None if prefix is None else settings.history_prefix or settings.topic_prefix,
        "traffic.budget_ms": scenario.budget_ms,
        "traffic.candidates": scenario.candidates,
        "traffic.suffix": scenario.suffix,
    }
    given = {key: value for key, value in own.items() if value is not None}
    if deployment.model is not None:
        # A calibration of another model would be refused.
        calibration = deployment.model / CALIBRATION_FILE
        given |= {
            "worker.model": deployment.model,
            "worker.calibration": calibration if calibration.exists() else None,
        }
    origin = f"scenario {settings.scenario}"
    return {key: _Given(value, origin) for key, value in given.items()}


def apart_from_secrets(overrides: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Valid `KEY=VALUE` overrides without secrets, and the secrets by environment variable.

    For a child process: other users can read its command line, but not its environment.
    """
    plain, secrets = [], {}
    for override in overrides:
        key, _, text = override.partition("=")
        field = setting_fields()[key.strip()]
        if field.secret:
            secrets[field.variable] = text.strip()
        else:
            plain.append(override)
    return plain, secrets


@functools.cache
def setting_fields() -> Mapping[str, SettingField]:
    """Every setting by its key, in the order of declaration; sections follow plain fields."""
    return {field.key: field for field in _walk(Settings, "")}


def values(settings: Settings) -> dict[str, Any]:
    """The value of every setting, by key."""
    return {key: functools.reduce(getattr, key.split("."), settings) for key in setting_fields()}


def plain(value: Any) -> Any:
    """A setting's value, or all settings, as JSON and YAML have them: without defaults, and with masked secrets."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", exclude_defaults=True)
    if isinstance(value, dict):
        return {str(name): plain(each) for name, each in value.items()}
    if isinstance(value, tuple):
        return [plain(each) for each in value]
    return to_jsonable_python(value)


def size_text(size_bytes: int) -> str:
    """A size in its largest exact unit: `512MiB`, `1000B`."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size_bytes and size_bytes % factor == 0:
            return f"{size_bytes // factor}{unit}"
    return f"{size_bytes}B"


def _walk(model: type[BaseModel], prefix: str) -> Iterable[SettingField]:
    sections = []
    for name, info in model.model_fields.items():
        section = section_of(info)
        if section is None:
            yield SettingField(prefix + name, info)
        else:
            sections.append((name, section))
    for name, section in sections:
        yield from _walk(section, f"{prefix}{name}.")


def section_of(info: FieldInfo) -> type[BaseModel] | None:
    """The section class of a field; None for a plain setting."""
    annotation = info.annotation
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def union_members(annotation: Any) -> tuple[Any, ...]:
    """The members of a union, or the annotation itself if it is not a union."""
    if typing.get_origin(annotation) is typing.Annotated:
        return union_members(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return tuple(member for part in typing.get_args(annotation) for member in union_members(part))
    return (annotation,)


def _from_file(path: Path) -> dict[str, _Given]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise RelayError(
            f"The settings file {path} cannot be read: {error.strerror}. --config needs a YAML file."
        ) from error
    except UnicodeDecodeError as error:
        raise RelayError(f"The settings file {path} is not UTF-8 text.") from error
    try:
        content = yaml.load(text, _StrictLoader)
    except yaml.YAMLError as error:
        raise RelayError(f"The settings file {path} is not YAML: {_yaml_problem(error)}.") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise RelayError(f"The settings file {path} must hold `key: value` lines, not a {type(content).__name__}.")
    return {key: _Given(value, str(path)) for key, value in _flatten(content, "", Settings, str(path))}


def _flatten(content: Mapping[Any, Any], prefix: str, model: type[BaseModel], origin: str) -> Iterable[tuple[str, Any]]:
    for name, value in content.items():
        key = f"{prefix}{name}"
        info = model.model_fields.get(name)
        if info is None:
            raise RelayError(_unknown(key, origin))
        section = section_of(info)
        if section is None:
            yield key, value
        elif isinstance(value, dict):
            yield from _flatten(value, f"{key}.", section, origin)
        elif value is not None:
            raise RelayError(f"{key} ({origin}) is a section: write its settings below it, indented.")


def _is_injected_by_kubernetes(variable: str, text: str) -> bool:
    """Whether Kubernetes sets the variable in each container, because a Service has a name that begins with relaygr."""
    if _SERVICE_VARIABLE.fullmatch(variable):
        return True
    return variable.endswith("_PORT") and text.startswith(("tcp://", "udp://"))


def _from_environment(environment: Mapping[str, str]) -> dict[str, _Given]:
    by_variable = {field.variable: field for field in setting_fields().values()}
    given = {}
    for variable, text in sorted(environment.items()):
        if not variable.startswith(ENV_PREFIX) or variable.startswith(TEST_ENV_PREFIX):
            continue
        field = by_variable.get(variable)
        if field is None and _is_injected_by_kubernetes(variable, text):
            continue
        if field is None:
            raise RelayError(f"The environment variable {variable} is not a setting. {_suggest(variable, by_variable)}")
        given[field.key] = _Given(_parse(field, text, variable), variable)
    return given


def _from_command_line(overrides: Iterable[str]) -> dict[str, _Given]:
    given = {}
    for override in overrides:
        key, equals, text = override.partition("=")
        key = key.strip()
        field = setting_fields().get(key)
        if not equals:
            # Of an unknown text nothing is shown: it may be a secret.
            near = "" if field is not None else f" {_suggest(key, setting_fields())}"
            raise RelayError(f"--set {key if field is not None else '...'} has no value: write --set KEY=VALUE.{near}")
        if field is None:
            # Only what looks like a key is shown: the rest may be a part of a secret.
            raise RelayError(_unknown("".join(_KEY.findall(key)[:1]), "--set"))
        given[key] = _Given(_parse(field, text.strip(), "--set"), "--set")
    return given


def _parse(field: SettingField, text: str, origin: str) -> Any:
    try:
        return field.parse(text)
    except yaml.YAMLError as error:
        raise RelayError(f"{field.key} ({origin}) is not YAML: {_yaml_problem(error)}.") from error


def _nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for key, value in flat.items():
        *sections, name = key.split(".")
        level = nested
        for section in sections:
            level = level.setdefault(section, {})
        level[name] = value
    return nested


def _unknown(key: str, origin: str) -> str:
    return f"{key} ({origin}) is not a setting. {_suggest(key, setting_fields())}"


def _suggest(name: str, known: Iterable[str]) -> str:
    """A suggestion: the same field in another section first, then a longer name in the same section, else the name with
    the closest spelling.
    """
    names = list(known)
    separator = "__" if name.startswith(ENV_PREFIX) else "."
    section, _, last = name.rpartition(separator)
    last = last.removeprefix(ENV_PREFIX)
    same_field = [candidate for candidate in names if candidate.removeprefix(ENV_PREFIX).split(separator)[-1] == last]
    longer = [
        candidate for candidate in names if section and candidate.startswith(section) and candidate.endswith(f"_{last}")
    ]
    close = same_field or longer or difflib.get_close_matches(name, names, n=1, cutoff=0.75)
    if close:
        return f"Did you mean {close[0]}?"
    return "`relaygr settings` lists all of them."


def _explain(error: ValidationError, given: Mapping[str, _Given]) -> str:
    """One line for each invalid value."""
    return "\n".join(_explain_one(detail, given) for detail in error.errors(include_url=False))


_HOW_TO_WRITE = {
    "byte_size": ": write a size such as 512MiB",
    "byte_size_unit": ": write a size such as 512MiB",
    "bool_parsing": ": write true or false",
    "bool_type": ": write true or false",
    "tuple_type": ": write a list such as [a, b]",
}
"""For the kinds of pydantic's errors that do not say what is allowed."""


def _explain_one(detail: Any, given: Mapping[str, _Given]) -> str:
    location = [str(part) for part in detail["loc"]]
    # pydantic appends the index of a list entry, or the name of a union member, to the location.
    lengths = range(len(location), 0, -1)
    key = next((name for n in lengths if (name := ".".join(location[:n])) in setting_fields()), ".".join(location))
    message = detail["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    field = setting_fields().get(key)
    if field is None:
        # The error is about a section as a whole: list the given settings of that section.
        inside = [name for name in given if not key or name.startswith(f"{key}.")]
        origins = ", ".join(f"{name} ({given[name].origin})" for name in inside)
        return f"{key or 'settings'}: {message}" + (f"; given: {origins}" if origins else "")
    entry = given.get(key)
    shown = "" if field.secret or entry is None else f" = {masked(repr(entry.value))}"
    origin = entry.origin if entry else DEFAULT_ORIGIN
    return f"{key}{shown} ({origin}): {message[:1].lower()}{message[1:]}{_HOW_TO_WRITE.get(detail['type'], '')}."


def _yaml_problem(error: yaml.YAMLError) -> str:
    """The problem and its line number; not the line's text, which may contain a secret."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"{error.problem}, line {error.problem_mark.line + 1}"
    return type(error).__name__


class _StrictLoader(yaml.SafeLoader):
    """Refuses a key that is given twice in YAML: the first value would be lost silently."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = key_node.value
            if not isinstance(key, str):
                raise yaml.constructor.ConstructorError(None, None, "a key must be a word", key_node.start_mark)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key} is given twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)
