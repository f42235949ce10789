"""Addresses in texts for people lose their users, passwords and queries, and nothing else."""

from __future__ import annotations

import pytest

from relaygr.runtime.masking import masked


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://bea:Tr0ub@models:8080/a/b cannot be read", "https://***@models:8080/a/b cannot be read"),
        ("s3://bucket/ranker?X-Amz-Signature=aa%2Fbb&x=1", "s3://bucket/ranker?***"),
        ("(url: /ranker/get?sig=aabb (Caused by x))", "(url: /ranker/get?*** (Caused by x))"),
        ("url='https://bea:Tr0ub@h/x?a=b', status 403", "url='https://***@h/x?***', status 403"),
        ("https://ghp_aabb@forge/x", "https://***@forge/x"),
        ("bea:Tr0ub@h:9100", "***@h:9100"),
        (
            "'SASL_SSL://bea:Tr0ub@k1:9093,SASL_SSL://bea:Tr0ub@k2:9093'",
            "'SASL_SSL://***@k1:9093,SASL_SSL://***@k2:9093'",
        ),
        ("['http://bea:Tr0ub@h/metrics', 'http://h/x']", "['http://***@h/metrics', 'http://h/x']"),
    ],
)
def test_an_address_is_shown_without_user_password_and_query(text: str, shown: str) -> None:
    assert masked(text) == shown


@pytest.mark.parametrize("password", ["a/b", "a?b", "a#b", "a@b", "a:b", "a b", "99999999/b", "a'b", 'a"b', "%2F", "["])
def test_a_password_that_is_not_encoded_as_it_should_be_is_not_shown_either(password: str) -> None:
    assert masked(f"x ftp://bea:{password}@host/path y") == "x ftp://***@host/path y"


@pytest.mark.parametrize(
    "text",
    [
        "models:/ranker@champion",
        "runs:/8f3a/checkpoint has no config.json",
        "hf://team/ranker@main/model.safetensors",
        "https://host:8081/@scope/a@b",
        "http://[::1]:9100/metrics",
        "http://host: Name or service not known, ask it@example.org",
        "kafka-1:9092,[::1]:9092",
        "why? since a=b",
        "KeyError: 'user:x'",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert masked(text) == text


def test_a_part_of_a_password_that_a_library_quotes_alone_is_masked() -> None:
    address = "ftp://bea:Tr0ub/dor@host/x?sig=aa%2Fbbcc"
    assert masked("Port could not be cast to integer value as 'Tr0ub'", of=address).endswith("as '***'")
    assert masked("no access with aa/bbcc", of=f"x {address}") == "no access with ***"
    assert masked("bea is unknown at host", of=address) == "bea is unknown at host"
