"""`docs/asyncapi.json` matches the classes and AsyncAPI's own schema."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from relaygr.schemas.asyncapi import document
from relaygr.schemas.codec import field_specs
from relaygr.schemas.json_schema import Form, schemas_of
from relaygr.schemas.topics import CATALOGUE
from tests.schemas.wire_samples import MESSAGES
from tests.schemas.wire_vectors import vectors

COMMITTED = Path(__file__).parents[2] / "docs" / "asyncapi.json"
SCHEMA = Path(__file__).with_name("asyncapi-3.0.0.schema.json.gz")
"""Of github.com/asyncapi/spec-json-schemas (Apache-2.0), without its descriptions and examples."""


def references(value: Any) -> list[str]:
    if isinstance(value, dict):
        own = [value["$ref"]] if "$ref" in value else []
        return own + [each for inner in value.values() for each in references(inner)]
    return [each for inner in value for each in references(inner)] if isinstance(value, list) else []


def test_the_committed_file_is_what_the_classes_generate() -> None:
    assert json.loads(COMMITTED.read_text(encoding="utf-8")) == document(), "run: make docs"


def test_it_is_a_document_of_asyncapi_3() -> None:
    schema = json.loads(gzip.decompress(SCHEMA.read_bytes()))
    validator = jsonschema.Draft7Validator(schema)
    assert [error.message[:200] for error in validator.iter_errors(document())] == []
    broken = document() | {"channels": {"retrieval": {"adress": "relaygr.retrieval"}}}
    assert not validator.is_valid(broken)


def test_every_reference_resolves() -> None:
    found = document()
    for reference in set(references(found)):
        place: Any = found
        for part in reference.removeprefix("#/").split("/"):
            place = place[part]


def test_every_topic_is_a_channel_and_every_field_a_property() -> None:
    found = document()
    assert {channel["address"] for channel in found["channels"].values()} == {
        spec.topic.named() for spec in CATALOGUE.values()
    }
    for message in {type(message) for message in MESSAGES.values()}:
        schema = found["components"]["schemas"][message.__name__]
        assert list(schema["properties"]) == [spec.name for spec in field_specs(message)]


@pytest.mark.parametrize("entry", vectors()["messages"], ids=lambda entry: entry["name"])
def test_the_json_form_of_each_vector_fits_the_schema_of_the_json_form(entry: dict[str, Any]) -> None:
    schemas = schemas_of([type(message) for message in MESSAGES.values()], Form.JSON)
    schema = {"$ref": f"#/components/schemas/{entry['kind']}", "components": {"schemas": schemas}}
    jsonschema.Draft202012Validator(schema).validate(entry["fields"])
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(schema).validate(entry["fields"] | {"user_id": 7, "worker_id": 7})
