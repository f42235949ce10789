"""The Avro of a topic: only the fields that are used are read, and no bytes and no schema end the reading."""

from __future__ import annotations

import base64
import io
import struct
from collections.abc import Iterator
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import fastavro
import pytest

from relaygr.ingest.registered import RegisteredValues
from relaygr.ingest.registry import SchemaRegistry
from relaygr.ingest.settings import RegistrySettings
from relaygr.runtime.errors import RelayError
from relaygr.schemas.limits import MAX_BEHAVIOURS
from tests.worlds.registry import Registry, endings_of_broken_bytes, served_registry

BASIC = "Basic " + base64.b64encode(b"shop:pass:word").decode()


@pytest.fixture
def registry() -> Iterator[Registry]:
    with served_registry() as served:
        yield served


def record(*fields: tuple[str, Any]) -> dict[str, Any]:
    return {"type": "record", "name": "Visit", "fields": [{"name": name, "type": kind} for name, kind in fields]}


def logical(kind: str, meaning: str, **more: Any) -> dict[str, Any]:
    return {"type": kind, "logicalType": meaning, **more}


def number(value: int) -> bytes:
    value = (value << 1) ^ (value >> 63)
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*parts, value))


def written(schema: Any, value: Any) -> bytes:
    stream = io.BytesIO()
    fastavro.schemaless_writer(stream, fastavro.parse_schema(schema), value)
    return stream.getvalue()


def read(registry: Registry, schema: Any, body: bytes, *used: str, schema_id: int = 7) -> dict[str, Any]:
    registry.schemas[schema_id] = schema
    values = RegisteredValues(SchemaRegistry(registry.url, RegistrySettings()))
    found = values.object(struct.pack(">bI", 0, schema_id) + body, None, lambda _: used)
    assert all(found[name] is None for name in found if name not in used)
    return {name: found[name] for name in used}


TREE = {
    "type": "record",
    "name": "Reply",
    "fields": [{"name": "text", "type": "string"}, {"name": "replies", "type": {"type": "array", "items": "Reply"}}],
}
CHAIN = {"type": "record", "name": "Link", "fields": [{"name": "next", "type": ["null", "Link"]}]}
ALWAYS = {"type": "record", "name": "Mirror", "fields": [{"name": "own", "type": "Mirror"}]}
HOLLOW = {"type": "record", "name": "Hollow", "fields": [{"name": "a", "type": "null"}, {"name": "b", "type": "null"}]}


def test_each_type_of_a_used_field_becomes_what_a_log_has(registry: Registry) -> None:
    moment = datetime(2021, 5, 3, 4, 5, 6, 789000, UTC)
    cases: dict[str, tuple[Any, Any, Any]] = {
        "text": ("string", "käse", "käse"),
        "whole": ("long", -(2**63), -(2**63)),
        "small": ("int", 64, 64),
        "real": ("double", 1.25, 1.25),
        "short_real": ("float", 0.5, 0.5),
        "flag": ("boolean", True, True),
        "absent": (["null", "string"], None, None),
        "either": (["null", "long", "string"], "x", "x"),
        "chosen": ({"type": "enum", "name": "Way", "symbols": ["web", "app"]}, "app", "app"),
        "at_ms": (logical("long", "timestamp-millis"), moment, "2021-05-03T04:05:06.789000+00:00"),
        "at_us": (logical("long", "local-timestamp-micros"), moment.replace(tzinfo=None), moment.isoformat()),
        "day": (logical("int", "date"), date(2021, 5, 3), "2021-05-03"),
        "price": (logical("bytes", "decimal", precision=9, scale=2), Decimal("-11.93"), "-11.93"),
        "sum": (
            logical("fixed", "decimal", name="Sum", size=6, precision=9, scale=0),
            Decimal("1193"),
            "1193",
        ),
        "uuid": (logical("string", "uuid"), UUID(int=77), str(UUID(int=77))),
        "strange": (logical("long", "of-tomorrow"), 12, 12),
        "items": ({"type": "array", "items": ["null", "long"]}, [1, None, 3], [1, None, 3]),
    }
    schema = record(*((name, kind) for name, (kind, _, _) in cases.items()))
    body = written(schema, {name: value for name, (_, value, _) in cases.items()})
    assert read(registry, schema, body, *cases) == {name: wanted for name, (_, _, wanted) in cases.items()}


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("bytes", b"\xff" * 70),
        ({"type": "fixed", "name": "Sum", "size": 20}, b"\0" * 20),
        ({"type": "map", "values": {"type": "array", "items": "double"}}, {"a": [1.0], "b": []}),
        (HOLLOW, {"a": None, "b": None}),
        ({"type": "array", "items": "null"}, [None, None]),
        ({"type": "array", "items": TREE}, [{"text": "x", "replies": [{"text": "y", "replies": []}]}] * 3),
        (CHAIN, {"next": {"next": {"next": None}}}),
        (logical("long", "timestamp-millis"), 2**62),
        (logical("fixed", "duration", name="Span", size=12), b"\1" * 12),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_a_field_that_is_not_used_may_be_of_any_type(registry: Registry, kind: Any, value: Any) -> None:
    schema = record(("user", "string"), ("other", kind), ("item", "long"))
    body = written(schema, {"user": "eve", "other": value, "item": 9})
    assert read(registry, schema, body, "user", "item") == {"user": "eve", "item": 9}


@pytest.mark.parametrize(
    ("field", "body"),
    [
        ({"type": "string", "default": None}, number(1) + b"x"),
        ({"type": ["null", "long"], "default": "null"}, number(1) + number(6)),
        ({"type": {"type": "long", "logicalType": {"name": "timestamp"}}, "default": "0"}, number(0)),
        ({"type": ["null", logical("bytes", "decimal", precision=64, scale=127)], "default": None}, number(0)),
        ({"type": logical("bytes", "decimal", precision=64, scale=-84)}, number(1) + b"x"),
        ({"type": logical("bytes", "decimal", precision="18", scale="2")}, number(1) + b"x"),
        ({"type": logical("fixed", "decimal", name="Two", size=2, precision=19)}, b"xy"),
        ({"type": {"type": "error", "name": "Refusal", "fields": [{"name": "code", "type": "int"}]}}, number(401)),
    ],
    ids=lambda value: repr(value)[:60],
)
def test_a_schema_that_registries_keep_and_strict_parsers_refuse_is_read(
    registry: Registry, field: dict[str, Any], body: bytes
) -> None:
    schema = record(("user", "string"), ("other", "null"), ("item", "long"))
    schema["fields"][1] |= field
    assert read(registry, schema, number(3) + b"eve" + body + number(9), "user", "item") == {"user": "eve", "item": 9}


def test_a_decimal_whose_scale_cannot_be_is_bytes(registry: Registry) -> None:
    schema = record(("sku", logical("bytes", "decimal", precision=64, scale=127)))
    with pytest.raises(ValueError, match="sku: it is bytes"):
        read(registry, schema, number(1) + b"x", "sku")


def test_blocks_of_a_list_with_their_size_are_read_and_passed_over(registry: Registry) -> None:
    block = number(-2) + number(4) + number(300) + number(301) + number(1) + number(5) + number(0)
    schema = record(("seen", {"type": "array", "items": "long"}), ("item", "long"))
    assert read(registry, schema, block + number(9), "seen", "item") == {"seen": [300, 301, 5], "item": 9}
    assert read(registry, schema, block + number(9), "item") == {"item": 9}


@pytest.mark.parametrize(
    ("kind", "body", "complaint"),
    [
        (CHAIN, number(1) * 4000 + number(0), "nested too deeply"),
        (TREE, (number(0) + number(1)) * 3000 + number(0) * 3001, "nested too deeply"),
        (ALWAYS, b"", "nested too deeply"),
        ({"type": "array", "items": ALWAYS}, number(1), "nested too deeply"),
        ({"type": "array", "items": "null"}, number(2**39) + number(0), "claims 549,755,813,888 items"),
        ({"type": "array", "items": HOLLOW}, number(-(2**39)) + number(0) * 2, "claims 549,755,813,888 items"),
        ({"type": "array", "items": {"type": "fixed", "name": "F", "size": 1 << 40}}, number(3), "bytes are missing"),
        ({"type": "array", "items": "long"}, number(9) + number(1) * 5, "bytes are missing"),
        ({"type": "map", "values": "null"}, number(30) + number(0) * 3, "claims 30 items"),
        ("string", number(2**40) + b"abc", "bytes are missing"),
        ("bytes", number(-5), "a length is negative"),
        ("double", b"\0" * 7, "bytes are missing"),
        ("long", b"\xff" * 11, "more than 64 bits"),
        (["null", "long"], number(2), "branch 2"),
    ],
    ids=lambda value: repr(value)[:40],
)
@pytest.mark.parametrize("used", [False, True])
def test_what_a_record_claims_is_bounded_by_its_bytes(
    registry: Registry, kind: Any, body: bytes, complaint: str, used: bool
) -> None:
    """The reader of a library would end the process, or read until the memory is full."""
    schema = record(("claim", kind))
    with pytest.raises(ValueError, match=f"{complaint}|claim: it is a record|claim: it is bytes|claim: it is a map"):
        read(registry, schema, body, *(("claim",) if used else ()))


@pytest.mark.parametrize(
    ("kind", "body", "complaint"),
    [
        ("bytes", number(1) + b"x", "sku: it is bytes"),
        (HOLLOW, b"", "sku: it is a record"),
        ({"type": "map", "values": "long"}, number(0), "sku: it is a map"),
        ({"type": "array", "items": "null"}, number(1) + number(0), "sku: it is a list of nulls"),
        (
            {"type": "array", "items": "boolean"},
            number(MAX_BEHAVIOURS + 1) + b"\1" * (MAX_BEHAVIOURS + 1),
            "sku: .*most",
        ),
        (logical("long", "timestamp-millis"), number(2**62), "sku: "),
        (logical("int", "date"), number(2**30), "sku: "),
        (logical("bytes", "decimal", precision=4, scale=2), number(9000) + b"\7" * 9000, "sku: "),
        (logical("string", "uuid"), number(1) + b"x", "sku: "),
        ("string", number(1) + b"\xff", "sku: "),
        ({"type": "enum", "name": "E", "symbols": ["a"]}, number(1), "sku: it is symbol 1 of an enum of 1"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_the_error_of_a_used_field_names_it(registry: Registry, kind: Any, body: bytes, complaint: str) -> None:
    with pytest.raises(ValueError, match=f"^{complaint}"):
        read(registry, record(("sku", kind)), body, "sku")


@pytest.mark.parametrize(
    ("kind", "body", "complaint"),
    [
        (logical("long", "timestamp-micros"), number(-(2**63)), "out of range"),
        (["null", logical("long", "local-timestamp-millis")], number(1) + number(2**60), "too large"),
        (logical("int", "date"), number(2**30), "days=1073741824"),
        (record(("user", logical("int", "date"))), number(-(2**30)), "^user: "),
        ({"type": "array", "items": "long"}, number(0), "a list"),
        ("double", struct.pack("<d", float("nan")), "too large a number"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_a_key_that_names_nobody_is_a_bad_record(registry: Registry, kind: Any, body: bytes, complaint: str) -> None:
    """The key of a record without a value: one with a time that Python has not ended the bridge."""
    registry.schemas[7] = kind
    values = RegisteredValues(SchemaRegistry(registry.url, RegistrySettings()))
    with pytest.raises(ValueError, match=complaint):
        values.key_text(struct.pack(">bI", 0, 7) + body, None, lambda names: names)


def test_any_bytes_are_a_record_or_a_bad_one(registry: Registry) -> None:
    kinds = ["string", ["null", "bytes"], TREE, {"type": "map", "values": CHAIN}, logical("long", "timestamp-micros")]
    schema = record(*((f"f{at}", kind) for at, kind in enumerate(kinds)))
    reply = {"text": "a", "replies": [{"text": "b", "replies": []}]}
    good = written(schema, {"f0": "x" * 9, "f1": b"y", "f2": reply, "f3": {"k": {"next": None}}, "f4": 10**15})
    registry.schemas[4] = schema
    values = RegisteredValues(SchemaRegistry(registry.url, RegistrySettings()))
    ended = endings_of_broken_bytes(values, 4, good)
    assert min(ended.values()) > 100, ended


def test_a_schema_is_read_with_all_to_which_it_refers(registry: Registry) -> None:
    """Of a diamond: money is needed by two others, and asked for once."""

    def answer(schema: Any, *references: tuple[str, str, int]) -> dict[str, Any]:
        names = ("name", "subject", "version")
        return {
            "schema": str(schema).replace("'", '"'),
            "references": [dict(zip(names, r, strict=True)) for r in references],
        }

    money = {"type": "enum", "name": "pay.Money", "symbols": ["eur", "usd"]}
    registry.subjects["pay%2Fmoney/versions/4"] = answer(money)
    for name in ("Price", "Refund"):
        schema = {"type": "record", "name": name, "namespace": "pay", "fields": [{"name": "in", "type": "Money"}]}
        registry.subjects[f"{name}/versions/1"] = answer(schema, ("pay.Money", "pay/money", 4))
    fields = record(("user", "string"), ("price", "pay.Price"), ("back", ["null", "pay.Refund"]), ("paid", "pay.Money"))
    whole = answer(fields, ("pay.Price", "Price", 1), ("pay.Refund", "Refund", 1), ("pay.Money", "pay/money", 4))
    body = number(3) + b"eve" + number(0) + number(1) + number(1) + number(1)
    assert read(registry, whole, body, "user", "paid") == {"user": "eve", "paid": "usd"}
    assert registry.paths.count("/subjects/pay%2Fmoney/versions/4") == 1


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        (
            {"schema": '"string"', "references": [{"name": "x", "subject": "gone", "version": 3}]},
            "version 3 of subject gone",
        ),
        ({"schema": '"shop.Unknown"'}, "schema 7 cannot be read: UnknownType"),
        ({"schema": "[" * 50_000 + "]" * 50_000}, "schema 7 is nested too deeply"),
        ({"schema": "{broken"}, "schema 7 cannot be read: JSONDecodeError"),
        ({"schema": '{"type": {"type": {"type": "long"}}}'}, "schema 7 cannot be read"),
        ({"schema": '{"__fastavro_parsed__": true, "type": "enum", "name": "x"}'}, "schema 7 cannot be read"),
        ({"schema": '{"type": "fixed", "name": "x", "size": -4}'}, "schema 7 cannot be read"),
        ({"schema": '"' + "x" * (1 << 20) + '"'}, "schema 7 is longer than 1,048,576 bytes"),
        ({"schema": "x = 1", "schemaType": "THRIFT"}, "schema 7 is THRIFT, and only Avro, Protobuf and JSON"),
        (
            {"schema": '"cycle.A"', "references": [{"name": "cycle.A", "subject": "cycle", "version": 1}]},
            "schema 7 cannot be read: UnknownType",
        ),
        (
            {"schema": '"int"', "references": [{"name": "x", "subject": f"s{n}", "version": n} for n in range(1, 99)]},
            "needs more than 64 other schemas",
        ),
    ],
    ids=lambda value: repr(value)[:50],
)
def test_a_schema_that_cannot_be_read_makes_bad_records_and_no_outage(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, answer: Any, complaint: str
) -> None:
    monkeypatch.setattr("relaygr.ingest.registry._PAUSES_S", ())
    registry.subjects |= {f"s{n}/versions/{n}": {"schema": '"int"'} for n in range(1, 99)}
    registry.subjects["cycle/versions/1"] = {"schema": '"cycle.A"', "references": answer.get("references")}
    with pytest.raises(ValueError, match=complaint):
        read(registry, answer, b"")


@pytest.mark.parametrize(
    "body", [b"<html>a proxy</html>", b"[]", b"{}", b'{"schema": "1", "references": [{}]}', b"[" * 9000]
)
def test_an_answer_that_no_registry_gives_is_an_outage(registry: Registry, body: bytes) -> None:
    with pytest.raises(RelayError, match=r"did not give schema 7: .*goes on where it stopped"):
        read(registry, body, b"")


@pytest.mark.parametrize(
    "body", [b"default backend - 404", b"", b"[]", b'{"error_code": 404}', b'{"error_code": {}}', b"[" * 9000]
)
def test_a_404_without_the_error_code_of_a_registry_is_an_outage(registry: Registry, body: bytes) -> None:
    registry.failures["/schemas/ids/7"] = 404, body
    with pytest.raises(RelayError, match=r"404.*without the error code of a registry"):
        read(registry, "int", b"")


def test_a_schema_that_is_registered_later_is_found(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each record of a schema that was unknown once was bad until the bridge was started again."""
    monkeypatch.setattr("relaygr.ingest.registry._PAUSES_S", ())
    values, content = RegisteredValues(SchemaRegistry(registry.url, RegistrySettings())), struct.pack(">bI", 0, 7)
    with pytest.raises(ValueError, match="the registry has no schema 7"):
        values.object(content, None, lambda _: ())
    registry.schemas[7] = record()
    with pytest.raises(ValueError, match="the registry has no schema 7"):
        values.object(content, None, lambda _: ())
    monkeypatch.setattr("relaygr.ingest.registered._UNKNOWN_S", 0.0)
    assert values.object(content, None, lambda _: ()) == {}


def test_unknown_schemas_are_waited_for_once_and_not_for_each_record(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relaygr.ingest.registry._PAUSES_S", (0.001, 0.001))
    values = RegisteredValues(SchemaRegistry(registry.url, RegistrySettings()))
    for schema_id in (901, 902, 903, 901):
        with pytest.raises(ValueError, match=f"the registry has no schema {schema_id}"):
            values.object(struct.pack(">bI", 0, schema_id), None, lambda _: ())
    assert [registry.paths.count(f"/schemas/ids/{schema_id}") for schema_id in (901, 902, 903)] == [3, 1, 1]


def test_a_redirect_to_another_address_is_refused_and_takes_no_password_there(registry: Registry) -> None:
    login = RegistrySettings(username="shop", password="pass:word")
    with served_registry() as other:
        registry.redirect = other.url
        with pytest.raises(RelayError, match=f"it redirects to {other.url}") as refused:
            SchemaRegistry(registry.url, login).schema(7)
        assert "pass" not in str(refused.value)
        assert registry.asked == [("/schemas/ids/7", BASIC)]
        assert other.asked == []


def test_a_redirect_on_the_same_address_is_followed(registry: Registry) -> None:
    registry.redirect, registry.authorization, registry.schemas[7] = "/moved", BASIC, "int"
    login = RegistrySettings(username="shop", password="pass:word")
    assert SchemaRegistry(registry.url, login).schema(7).content == b'"int"'


def test_the_password_of_a_registry_comes_from_a_file_or_from_its_address(registry: Registry, tmp_path: Path) -> None:
    registry.authorization, registry.schemas[7] = BASIC, "int"
    (tmp_path / "password").write_text("pass:word\n")
    from_file = RegistrySettings(username="shop", password_file=tmp_path / "password")
    assert SchemaRegistry(registry.url, from_file).schema(7).content == b'"int"'
    other = RegistrySettings(username="someone", password="else")
    address = registry.url.replace("//", "//shop:pass%3Aword@")
    assert SchemaRegistry(address, other).schema(7).content == b'"int"'
    for wrong in (other, RegistrySettings()):
        with pytest.raises(RelayError, match="HTTP Error 401"):
            SchemaRegistry(registry.url, wrong).schema(7)


@pytest.mark.parametrize(
    "url",
    ["ftp://ann:Gh0st@registry", "ann:Gh0st@registry:8081", "http://ann:Gh0/st@registry", "http://ann:Gh0st@[::1"],
)
def test_a_wrong_address_of_a_registry_is_shown_without_its_password(url: str) -> None:
    with pytest.raises(RelayError, match=r"--schema-registry is .*registry:8081") as refused:
        SchemaRegistry(url, RegistrySettings())
    assert "Gh0" not in str(refused.value)
