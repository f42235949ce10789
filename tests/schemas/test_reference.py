"""`docs/messages.md` matches the classes."""

from __future__ import annotations

from pathlib import Path

from relaygr.schemas.codec import field_specs
from relaygr.schemas.reference import reference
from relaygr.schemas.topics import CATALOGUE
from tests.strategies import messages

PAGE = Path(__file__).parents[2] / "docs" / "messages.md"


def test_the_committed_page_is_what_the_classes_generate() -> None:
    assert PAGE.read_text(encoding="utf-8") == reference(), "run: make docs"


def test_every_field_has_a_meaning() -> None:
    for message in messages():
        assert [spec.name for spec in field_specs(message) if not spec.doc] == []


def test_the_page_names_every_topic() -> None:
    page = reference()
    assert [spec.topic for spec in CATALOGUE.values() if f"`{spec.topic.named()}`" not in page] == []
