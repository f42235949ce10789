"""The Protobuf of a topic: only the fields that are used are read, and no bytes and no schema end the reading."""

from __future__ import annotations

import base64
import random
import struct
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from google.protobuf import timestamp_pb2, wrappers_pb2
from google.protobuf.descriptor_pb2 import Edition, FeatureSet, FileDescriptorProto

from relaygr.ingest.registered import RegisteredValues
from relaygr.ingest.registry import SchemaRegistry
from relaygr.ingest.settings import RegistrySettings
from relaygr.runtime.errors import RelayError
from relaygr.schemas.limits import MAX_BEHAVIOURS
from tests.worlds.protobuf import answer, file, message, written
from tests.worlds.registry import Registry, endings_of_broken_bytes, served_registry

FIRST = b"\0"
TIMES = FileDescriptorProto.FromString(timestamp_pb2.DESCRIPTOR.serialized_pb)
WRAPPERS = FileDescriptorProto.FromString(wrappers_pb2.DESCRIPTOR.serialized_pb)
MOMENT = {"seconds": 1_620_014_706, "nanos": 789_000_000}


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[Registry]:
    monkeypatch.setattr("relaygr.ingest.registry._PAUSES_S", ())
    with served_registry() as served:
        yield served


def values_of(registry: Registry) -> RegisteredValues:
    return RegisteredValues(SchemaRegistry(registry.url, RegistrySettings()))


def read(registry: Registry, described: Any, body: bytes, *used: str) -> dict[str, Any]:
    """The used fields of a body, which begins with its message indexes."""
    registry.schemas[7] = answer(described) if isinstance(described, FileDescriptorProto) else described
    found = values_of(registry).object(struct.pack(">bI", 0, 7) + body, None, lambda _: used)
    assert all(found[name] is None for name in found if name not in used)
    return {name: found[name] for name in used}


def test_each_type_of_a_used_field_becomes_what_a_log_has(registry: Registry) -> None:
    cases: dict[str, tuple[str, Any, Any]] = {
        "text": ("string", "käse", "käse"),
        "whole": ("int64", -(2**63), -(2**63)),
        "large": ("uint64", 2**64 - 1, 2**64 - 1),
        "small": ("sint32", -64, -64),
        "fixed": ("sfixed64", -7, -7),
        "real": ("double", 1.25, 1.25),
        "short_real": ("float", 0.5, 0.5),
        "flag": ("bool", True, True),
        "way": ("Way", 1, "APP"),
        "way_of_a_later_schema": ("Way", 9, 9),
        "nothing_said": ("int32", None, 0),
        "nothing": ("optional int32", None, None),
        "zero": ("optional int32", 0, 0),
        "at": (".google.protobuf.Timestamp", MOMENT, "2021-05-03T04:05:06.789000+00:00"),
        "no_time": ("google.protobuf.Timestamp", None, None),
        "wrapped": (".google.protobuf.Int64Value", {"value": 0}, 0),
        "no_wrapped": (".google.protobuf.StringValue", None, None),
        "items": ("repeated int64", [1, 2, 3], [1, 2, 3]),
        "none": ("repeated string", [], []),
        "ways": ("repeated Way", [0, 1], ["WEB", "APP"]),
        "times": ("repeated .google.protobuf.Timestamp", [MOMENT, {}], None),
    }
    described = file(
        message("Visit", **{name: kind for name, (kind, _, _) in cases.items()}),
        enums={"Way": ["WEB", "APP"]},
        imports=[TIMES.name, WRAPPERS.name],
    )
    given = {name: value for name, (_, value, _) in cases.items() if value is not None}
    body = FIRST + written("Visit", given, TIMES, WRAPPERS, described)
    wanted = {name: wanted for name, (_, _, wanted) in cases.items()}
    wanted["times"] = [wanted["at"], "1970-01-01T00:00:00+00:00"]
    assert read(registry, described, body, *cases) == wanted


def test_decimals_and_dates_of_connectors_are_texts(registry: Registry) -> None:
    """Confluent's registry knows these imports without a reference, and gives no descriptor of them."""
    decimal = file(message("Decimal", value="bytes", precision="uint32", scale="int32"))
    day = file(message("Date", year="int32", month="int32", day="int32"), name="day.proto")
    for path in ("confluent/type/decimal.proto", "confluent/types/decimal.proto"):
        described = file(
            message("Row", price=".confluent.type.Decimal", day=".google.type.Date"),
            imports=["confluent/meta.proto", "google/type/date.proto", path],
        )
        # Their messages without the packages, which are not in the bytes.
        stand_in = file(message("Row", price="Decimal", day="Date"), name="row.proto", imports=[decimal.name, day.name])
        price = {"value": (-1193).to_bytes(2, "big", signed=True), "precision": 9, "scale": 2}
        content = {"price": price, "day": {"year": 2021, "month": 5, "day": 3}}
        body = FIRST + written("Row", content, decimal, day, stand_in)
        assert read(registry, described, body, "price", "day") == {"price": "-11.93", "day": "2021-05-03"}


def test_a_field_of_proto2_that_is_not_set_has_its_default_or_none(registry: Registry) -> None:
    described = file(message("Visit", user="string", shop="string"), syntax="proto2")
    described.message_type[0].field[1].default_value = "main"
    assert read(registry, described, FIRST, "user", "shop") == {"user": None, "shop": "main"}


def test_a_file_of_an_edition_says_which_fields_may_be_absent(registry: Registry) -> None:
    described = file(message("Visit", user="string", item="int64"), syntax="editions")
    described.edition = Edition.EDITION_2023
    described.options.features.field_presence = FeatureSet.IMPLICIT
    described.message_type[0].field[1].options.features.field_presence = FeatureSet.EXPLICIT
    assert read(registry, described, FIRST, "user", "item") == {"user": "", "item": None}


def test_of_a_oneof_the_field_that_is_set_is_read(registry: Registry) -> None:
    described = file(message("Visit", sku="string", offer="int64", user="string"))
    described.message_type[0].oneof_decl.add(name="what")
    for field in described.message_type[0].field[:2]:
        field.oneof_index = 0
    body = FIRST + written("Visit", {"offer": 0, "user": "eve"}, described)
    assert read(registry, described, body, "sku", "offer", "user") == {"sku": None, "offer": 0, "user": "eve"}


@pytest.mark.parametrize(
    ("indexes", "wanted"),
    [
        (b"\0", "first"),
        (b"\2\0", "first"),  # Apicurio writes [0] so.
        (b"\2\2", "second"),
        (b"\4\2\2", "inner"),
        (b"\6\2\2\0", "innermost"),
    ],
    ids=lambda value: repr(value),
)
def test_message_indexes_lead_to_the_message_of_a_record(registry: Registry, indexes: bytes, wanted: str) -> None:
    inner = message("Inner", message("Innermost", innermost="string"), inner="string")
    described = file(message("First", first="string"), message("Second", message("Other"), inner, second="string"))
    assert read(registry, described, indexes + b"\n\3eve", wanted) == {wanted: "eve"}


@pytest.mark.parametrize(
    ("indexes", "complaint"),
    [
        (b"", "message indexes are not complete"),
        (b"\4\0", "message indexes are not complete"),
        (b"\1\0", "use.deprecated.format"),
        (b"\2\4", "it is message 2 of a schema of 2"),
        (b"\2\1", "it is message -1 of"),
        (b"\4\0\0", "it is message 0 of a schema of 0"),
        (b"\xfe\xff\xff\xff\x0f" + b"\0" * 90, "message indexes, expected at most 100"),
        (b"\xff" * 12, "more than 64 bits"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_message_indexes_that_lead_nowhere_make_a_bad_record(
    registry: Registry, indexes: bytes, complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        read(registry, file(message("First"), message("Second")), indexes)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("bytes", b"\n\3\xff\xfe\xfd"),
        ("string", b"\n\3\xff\xfe\xfd"),
        ("repeated Visit", b"\n\0\n\0"),
        ("repeated map<string, int64>", b"\n\5\n\1a\x10\4"),  # As Karapace writes a map.
        (".confluent.type.Variant", b"\n\0"),
        (".shop.Nowhere", b"\n\0"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_a_field_that_is_not_used_may_be_of_any_type(registry: Registry, kind: str, value: bytes) -> None:
    described = file(message("Visit", other=kind, user="string", item="int64"), imports=["confluent/meta.proto"])
    body = FIRST + value + b"\x12\3eve\x18\x09"
    assert read(registry, described, body, "user", "item") == {"user": "eve", "item": 9}


def test_a_map_without_its_entry_message_and_optional_without_oneof_are_read(registry: Registry) -> None:
    """Karapace serialises so; the parser's own pool refuses both."""
    described = file(message("Visit", tags="repeated map<string, string>", user="string"))
    described.message_type[0].field[1].proto3_optional = True
    assert read(registry, described, FIRST + b"\x12\3eve", "user") == {"user": "eve"}
    assert read(registry, described, FIRST, "user") == {"user": None}


@pytest.mark.parametrize(
    ("kind", "body", "complaint"),
    [
        ("bytes", b"\n\1x", "sku: it is bytes"),
        ("Other", b"\n\0", "sku: it is a message or a map"),
        ("repeated Other", b"\n\0", "sku: it is a message or a map"),
        (".google.protobuf.BytesValue", b"\n\0", "sku: it is a message or a map"),
        ("repeated bool", b"\n" + b"\x81\x80\x08" + b"\1" * (MAX_BEHAVIOURS + 1), "sku: it is a list of 131,073"),
        (".google.protobuf.Timestamp", b"\n\x0a\x08" + b"\xff" * 8 + b"\x7f", "sku: "),
        (".google.type.Date", b"\n\0", "sku: year 0|sku: .*out of range"),
        (".confluent.type.Decimal", b"\n\xab\x46\n\xa8\x46" + b"\7" * 9000, "sku: "),
        ("string", b"\n\1\xff", "not Protobuf of its schema"),
        ("string", b"\n\5abc", "not Protobuf of its schema"),
        ("Other", b"\x0b" * 5000, "not Protobuf of its schema"),
        (".shop.Nowhere", b"\n\0", "the message Visit cannot be read: TypeError"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_a_used_field_that_cannot_be_read_makes_a_bad_record(
    registry: Registry, kind: str, body: bytes, complaint: str
) -> None:
    imports = [TIMES.name, WRAPPERS.name, "google/type/date.proto", "confluent/type/decimal.proto"]
    described = file(message("Visit", sku=kind), message("Other"), imports=imports)
    with pytest.raises(ValueError, match=complaint):
        read(registry, described, FIRST + body, "sku")


def referring(registry: Registry) -> tuple[FileDescriptorProto, bytes]:
    """A visit whose enum is in a file that another one imports publicly, and its body."""
    ways = file(enums={"Way": ["WEB", "APP"]}, name="ways.proto")
    common = file(name="common.proto", imports=["shop/ways.proto"])
    common.public_dependency.append(0)
    described = file(message("Visit", user="string", way="Way"), imports=["shop/common.proto"])
    registry.schemas |= {3: answer(ways), 4: answer(common, ("shop/ways.proto", "shop/ways", 2))}
    registry.subjects |= {
        "shop%2Fways/versions/2": answer(ways, schema_id=3),
        "common/versions/1": answer(common, ("shop/ways.proto", "shop/ways", 2), schema_id=4),
    }
    return described, FIRST + b"\n\3eve\x10\1"


def test_imports_are_read_by_their_subjects_and_versions(registry: Registry) -> None:
    described, body = referring(registry)
    references = ("shop/common.proto", "common", 1), ("shop/ways.proto", "shop/ways", 2)
    assert read(registry, answer(described, *references), body, "user", "way") == {"user": "eve", "way": "APP"}
    assert [path for path in registry.paths if "ways" in path] == ["/subjects/shop%2Fways/versions/2"]
    assert registry.paths.count("/schemas/ids/3?format=serialized") == 1


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"references": [{"name": "x.proto", "subject": "gone", "version": 3}]}, "no version 3 of subject gone"),
        ({"serialized": "/////w=="}, "schema 7 cannot be read: "),
        ({"references": []}, r"the message Visit cannot be read: TypeError .*Way"),
        (
            {"references": [{"name": "shop/common.proto", "subject": "cycle", "version": 1}]},
            "the message Visit cannot be read: TypeError",
        ),
        (
            {"references": [{"name": "x", "subject": f"s{n}", "version": n} for n in range(1, 99)]},
            "needs more than 64 other schemas",
        ),
    ],
    ids=lambda value: repr(value)[:50],
)
def test_a_schema_that_cannot_be_read_makes_bad_records_and_no_outage(
    registry: Registry, change: dict[str, Any], complaint: str
) -> None:
    described, body = referring(registry)
    cycle = answer(file(name="c", imports=["shop/common.proto"]), ("shop/common.proto", "cycle", 1), schema_id=5)
    registry.schemas |= {5: cycle, 6: answer(file())}
    registry.subjects |= {f"s{n}/versions/{n}": answer(file(), schema_id=6) for n in range(1, 99)}
    registry.subjects["cycle/versions/1"] = cycle
    with pytest.raises(ValueError, match=complaint):
        read(registry, answer(described) | change, body, "user", "way")


def test_a_registry_that_gives_text_only_is_refused_with_a_sentence(registry: Registry) -> None:
    described = answer(file(message("Visit", user="string")))
    del described["serialized"]
    with pytest.raises(RelayError, match=r"gives schema 7, which is of Protobuf, as text only.*Redpanda"):
        read(registry, described, FIRST, "user")


def test_a_registry_that_fails_at_the_descriptor_is_an_outage(registry: Registry) -> None:
    """Karapace answers so for a schema with references."""
    registry.failures["/schemas/ids/7?format=serialized"] = 500, b"{}"
    with pytest.raises(RelayError, match=r"did not give schema 7: HTTP Error 500"):
        read(registry, file(message("Visit")), FIRST)


def test_a_schema_in_a_header_is_found_by_its_guid(registry: Registry) -> None:
    guid = uuid.UUID(int=77)
    described = file(message("Other"), message("Visit", user="string"))
    registry.schemas |= {str(guid): answer(described), "json": {"schema": "{}", "schemaType": "JSON"}}
    values = values_of(registry)
    header = b"\1" + guid.bytes + b"\2\2"
    assert values.object(b"\n\3eve", header, lambda names: names) == {"user": "eve"}
    assert values.object(header + b"\n\3eve", None, lambda names: names) == {"user": "eve"}
    assert values.key_text(b"\n\3eve", header, lambda names: names) == b'{"user": "eve"}'
    for bad in (header[:17], header[:9], b"", b"\2" + header[1:]):
        with pytest.raises(ValueError, match=r"it is message -2|the header with its schema does not begin"):
            values.object(b"\n\3eve" * 9, bad, lambda names: names)
    assert registry.paths == [f"/schemas/guids/{guid}", f"/schemas/guids/{guid}?format=serialized"]


def test_what_confluents_serialisers_wrote_is_read(registry: Registry) -> None:
    """Schemas and values as `ProtobufSerializer` and `JSONSerializer` of confluent-kafka 2.16.1 registered and wrote
    them, with `HeaderSchemaIdSerializer` and without.
    """
    kinds = {"schema": "ChBzaG9wL2tpbmRzLnByb3RvEgRzaG9wKhkKBEtpbmQSCAoEVklFVxAAEgcKA0JVWRABYgZwcm90bzM="}
    visit = {
        "schema": "ChBzaG9wL3Zpc2l0LnByb3RvEgRzaG9wGhBzaG9wL2tpbmRzLnByb3RvGh9nb29nbGUvcHJvdG9idWYvdGltZXN0YW"
        "1wLnByb3RvIgYKBFBpbmciZAoFVmlzaXQSCwoDdWlkGAEgASgJEgsKA3NrdRgCIAEoAxImCgJhdBgDIAEoCzIaLmdv"
        "b2dsZS5wcm90b2J1Zi5UaW1lc3RhbXASGQoFZXZlbnQYBCABKA4yCi5zaG9wLktpbmRiBnByb3RvMw==",
        "references": [{"name": "shop/kinds.proto", "subject": "shop/kinds.proto", "version": 1}],
    }
    guid = uuid.UUID(int=2)
    kinds, visit = ({**each, "schemaType": "PROTOBUF"} for each in (kinds, visit))
    registry.schemas |= {1: kinds, 2: visit, str(guid): visit, 3: {"schema": "{}", "schemaType": "JSON"}}
    registry.subjects["shop%2Fkinds.proto/versions/1"] = {**kinds, "id": 1}
    values, wanted = values_of(registry), {"uid": "ann", "sku": 7, "event": "BUY"}
    for content, header, at in (
        ("AAAAAAICAgoDYW5uEAcaBgiAoPj6BSAB", None, "2020-09-13T12:26:40+00:00"),
        ("CgNhbm4QBxoGCICg+PoFIAE=", "AQAAAAAAAAAAAAAAAAAAAAICAg==", "2020-09-13T12:26:40+00:00"),
        (
            "AAAAAAN7InVpZCI6ImFubiIsInNrdSI6NywiYXQiOjE2MDAwMDAwMDAwMDAsImV2ZW50IjoiQlVZIn0=",
            None,
            1_600_000_000_000,
        ),
    ):
        before = None if header is None else base64.b64decode(header)
        assert values.object(base64.b64decode(content), before, lambda names: names) == {**wanted, "at": at}
    assert values.object(base64.b64decode("AAAAAAIA"), None, lambda names: names) == {}, "a message of no fields"


def test_a_topic_may_have_all_three_types_and_later_schemas_of_each(registry: Registry) -> None:
    avro = {"type": "record", "name": "Visit", "fields": [{"name": "user", "type": "string"}]}
    json_schema = {"schema": '{"type": "object"}', "schemaType": "JSON", "references": [{"name": "x"}]}
    later = file(message("Visit", user="string", item="optional int64"))
    registry.schemas |= {1: avro, 2: json_schema, 3: answer(file(message("Visit", user="string"))), 4: answer(later)}
    values = values_of(registry)
    bodies = {1: b"\6eve", 2: b'{"user": "eve"}', 3: FIRST + b"\n\3eve", 4: FIRST + b"\n\3eve\x10\7"}
    for _ in range(2):
        for schema_id, body in bodies.items():
            found = values.object(struct.pack(">bI", 0, schema_id) + body, None, lambda names: names)
            assert found == {"user": "eve", **({"item": 7} if schema_id == 4 else {})}
    assert len(registry.paths) == 6
    for body in (b"", b"[]", b'{"user": "eve"', b"[" * 9000, b'{"a": NaN}'):
        with pytest.raises(ValueError):
            values.object(struct.pack(">bI", 0, 2) + body, None, lambda names: names)
    assert values.key_text(struct.pack(">bI", 0, 2) + b'"eve"', None, lambda names: names) == b'"eve"'


def test_any_bytes_are_a_message_or_a_bad_one(registry: Registry) -> None:
    kinds = ["string", "repeated sint32", "repeated Visit", "optional double", ".google.protobuf.Timestamp", "Way"]
    described = file(
        message("Visit", **{f"f{at}": kind for at, kind in enumerate(kinds)}),
        enums={"Way": ["WEB", "APP"]},
        imports=[TIMES.name],
    )
    content = {"f0": "käse", "f1": [1, -2, 300], "f2": [{"f0": "x"}], "f3": 0.5, "f4": MOMENT, "f5": 1}
    good = FIRST + written("Visit", content, TIMES, described)
    registry.schemas[7] = answer(described)
    ended = endings_of_broken_bytes(values_of(registry), 7, good)
    assert min(ended.values()) > 100, ended


@pytest.mark.slow
def test_any_descriptor_is_read_or_makes_bad_records(registry: Registry) -> None:
    described, body = referring(registry)
    good = described.SerializeToString()
    values, draw, ended = values_of(registry), random.Random(12), {True: 0, False: 0}
    for schema_id in range(10, 400):
        changed = bytearray(good)
        for _ in range(draw.randint(1, 3)):
            changed[draw.randrange(len(changed))] = draw.randrange(256)
        whole = answer(described, ("shop/common.proto", "common", 1))
        registry.schemas[schema_id] = whole | {"serialized": base64.b64encode(changed).decode()}
        try:
            values.object(struct.pack(">bI", 0, schema_id) + body, None, lambda names: names)
            ended[True] += 1
        except ValueError:
            ended[False] += 1
    assert min(ended.values()) > 20, ended
