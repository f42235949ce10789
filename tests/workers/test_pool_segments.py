"""Prefixes as objects of the pool: what an object covers, and what its key and its seal depend on."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from relaygr.schemas.digest import BLOCK, digest_chain
from relaygr.worker.cache.identity import PrefixKey
from relaygr.worker.kv import DramGeometry, DramKvDtype, KvDtype, KvGeometry, PrefixLayout
from relaygr.worker.pool.segments import SEAL_BYTES, Segments
from relaygr.worker.pool.stores.contract import ObjectKey
from tests.worlds.real_executor import behaviours_of

GEOMETRY = DramGeometry(KvGeometry(4, 2, 32, 32, 64, KvDtype.FLOAT32))
FEATURES = np.array([1], "<i8")
PLAIN = PrefixLayout(0, 1)
A, B = (ObjectKey(model, "1", "2") for model in "ab")


def segments_of(layout: PrefixLayout = PLAIN, geometry: DramGeometry = GEOMETRY, secret: bytes = b"s"):
    return Segments("relaygr", secret, geometry, layout)


def key_of(length: int, user: str = "ann", namespace: bytes = b"m", seed: int = 0) -> PrefixKey:
    behaviours = behaviours_of(length, seed)
    return PrefixKey(user, namespace, digest_chain(FEATURES, behaviours), behaviours)


@pytest.mark.parametrize("layout", [PrefixLayout(0, 1), PrefixLayout(1, 1), PrefixLayout(3, 2)], ids=str)
@pytest.mark.parametrize("page_tokens", [16, 64, 100])
def test_objects_hold_whole_pages_of_behaviours_that_their_digest_covers(layout, page_tokens: int) -> None:
    cut = segments_of(layout, DramGeometry(replace(GEOMETRY.kv, page_tokens=page_tokens)))
    assert cut.behaviours % BLOCK == 0
    for length in (0, 1, cut.behaviours - 1, cut.behaviours, 3 * cut.behaviours + 5):
        found = cut.of(key_of(length), length)
        assert [each.first_page for each in found] == [0, *(each.end_page for each in found[:-1])][: len(found)]
        assert all(each.first_page < each.end_page for each in found)
        for number, each in enumerate(found, 1):
            assert each.end_page * page_tokens <= layout.tokens(number * cut.behaviours)
        assert cut.pages(length) == (found[-1].end_page if found else 0)
        covered = cut.covered(length)
        assert layout.tokens(covered) <= cut.pages(length) * page_tokens or covered == 0
        assert covered <= length and (not found or layout.tokens(covered + 1) > cut.pages(length) * page_tokens)


def test_a_history_that_grows_adds_objects_and_keeps_the_others() -> None:
    cut = segments_of()
    short, long = (cut.of(key_of(length), length) for length in (2 * cut.behaviours, 4 * cut.behaviours + 7))
    assert len(short) == 2 and len(long) == 4 and long[:2] == short


def test_another_user_model_history_form_or_secret_is_another_key() -> None:
    cut = segments_of()
    length = cut.behaviours
    keys = [
        cut.of(key_of(length), length)[0].key,
        cut.of(key_of(length, user="bob"), length)[0].key,
        cut.of(key_of(length, namespace=b"n"), length)[0].key,
        cut.of(key_of(length, seed=1), length)[0].key,
        segments_of(secret=b"t").of(key_of(length), length)[0].key,
    ]
    coded = segments_of(geometry=replace(GEOMETRY, dtype=DramKvDtype.BFLOAT16))
    keys.append(coded.of(key_of(coded.behaviours), coded.behaviours)[0].key)
    assert len(set(keys)) == len(keys)
    assert not any("ann" in str(key) or "bob" in str(key) for key in keys)


def test_a_prefix_that_can_not_grow_has_no_objects() -> None:
    cut = segments_of()
    length = 2 * cut.behaviours
    assert cut.of(replace(key_of(length), growable=False), length) == []
    assert cut.of(replace(key_of(length), user_id=""), length) == []


def test_keys_and_seals_are_those_of_earlier_versions_of_the_worker() -> None:
    """Workers of both versions share the objects, and a deletion finds those that the earlier one wrote."""
    cut, pages = segments_of(), np.arange(400, dtype=np.uint8).reshape(4, 100)
    key = cut.of(key_of(cut.behaviours), cut.behaviours)[0].key
    assert str(key) == (
        "d5f5a12a4fc7534685dce9c1cb14a2fc/1efa805931e5906ddb1fb0ec83aef3d8/f69b0fbadb273881889972e5ce598247"
    )
    assert cut.seal(key, pages).tobytes().hex() == "db827f711a80ac992ea249ec154c76c3e233d7a165b0835b4be5ea5887aa1644"


def test_a_seal_changes_with_the_key_with_each_page_and_with_the_secret() -> None:
    cut, pages = segments_of(), np.arange(400, dtype=np.uint8).reshape(4, 100)
    seals = [cut.seal(A, pages), cut.seal(B, pages), segments_of(secret=b"t").seal(A, pages)]
    for page in range(4):
        changed = pages.copy()
        changed[page, 99] ^= 1
        seals.append(cut.seal(A, changed))
    seals.append(cut.seal(A, pages[[1, 0, 2, 3]]))
    assert all(seal.nbytes == SEAL_BYTES for seal in seals)
    assert len({seal.tobytes() for seal in seals}) == len(seals)
    assert (cut.seal(A, pages) == seals[0]).all()
