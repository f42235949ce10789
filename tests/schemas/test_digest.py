"""The digest chain: histories with equal beginnings, and no others, have equal digests."""

from __future__ import annotations

import struct
from hashlib import blake2b

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relaygr.schemas import Behaviours, DigestChain, digest_chain
from relaygr.schemas.digest import BLOCK, digest_at, extend_chain

FEATURES = np.array([3, 1], "<i8")


def behaviours(length: int, seed: int = 0) -> Behaviours:
    rng = np.random.default_rng(seed)
    return Behaviours(
        rng.integers(0, 2**62, length),
        rng.integers(0, 9, length).astype("<u2"),
        np.sort(rng.integers(0, 2**40, length)),
    )


def test_the_chain_is_what_its_description_says() -> None:
    """The test computes the chain with `struct` alone, as a publisher in another language would."""
    history = behaviours(BLOCK + 3)
    current = blake2b(b"relaygr.history.1" + struct.pack("<Iqq", 2, 3, 1), digest_size=16).digest()
    expected = [current]
    for start in (0, BLOCK):
        part = history[start : start + BLOCK]
        count = len(part)
        current = blake2b(
            current
            + struct.pack(f"<{count}q", *part.items.tolist())
            + struct.pack(f"<{count}H", *part.actions.tolist())
            + struct.pack(f"<{count}q", *part.timestamps_ms.tolist()),
            digest_size=16,
        ).digest()
        expected.append(current)
    chain = digest_chain(FEATURES, history)
    assert [chain.seed, *chain.blocks] == expected
    assert chain.digest == expected[-1]


def test_an_empty_history_has_the_seed_as_digest() -> None:
    chain = digest_chain(FEATURES, Behaviours.empty())
    assert chain.digest == chain.seed == chain.at(0)


@settings(max_examples=50)
@given(length=st.integers(0, 4 * BLOCK), cut=st.integers(0, 4 * BLOCK))
def test_a_chain_extended_is_the_chain_computed_at_once(length: int, cut: int) -> None:
    history = behaviours(length)
    start = digest_chain(FEATURES, history[: min(cut, length)])
    assert extend_chain(start, history) == digest_chain(FEATURES, history)


@settings(max_examples=50)
@given(length=st.integers(0, 4 * BLOCK), data=st.data())
def test_the_digest_of_a_start_is_that_of_the_shorter_history(length: int, data: st.DataObject) -> None:
    history = behaviours(length)
    cut = data.draw(st.integers(0, length))
    chain = digest_chain(FEATURES, history)
    shorter = digest_chain(FEATURES, history[:cut])
    assert digest_at(chain, history, cut) == shorter.digest
    assert chain.at(cut) in (None, shorter.digest)
    assert chain.common_length(shorter) in (cut, cut // BLOCK * BLOCK)
    assert shorter.common_length(chain) == chain.common_length(shorter)


def test_a_digest_beyond_the_history_is_refused() -> None:
    history = behaviours(10)
    with pytest.raises(ValueError, match="has 10 behaviours, not 11"):
        digest_at(digest_chain(FEATURES, history), history, 11)


@pytest.mark.parametrize("field", ["items", "actions", "timestamps_ms"])
@pytest.mark.parametrize("at", [0, BLOCK - 1, BLOCK, 2 * BLOCK - 1])
def test_a_change_is_seen_from_its_block_on(field: str, at: int) -> None:
    history = behaviours(3 * BLOCK)
    arrays = {name: getattr(history, name).copy() for name in ("items", "actions", "timestamps_ms")}
    arrays[field][at] += 1
    ours, theirs = digest_chain(FEATURES, history), digest_chain(FEATURES, Behaviours(**arrays))
    assert ours.common_length(theirs) == at // BLOCK * BLOCK
    assert ours.digest != theirs.digest


def test_other_features_share_nothing() -> None:
    history = behaviours(BLOCK)
    ours, theirs = digest_chain(FEATURES, history), digest_chain(FEATURES[::-1], history)
    assert ours.common_length(theirs) == 0
    assert ours.digest != theirs.digest


def test_the_byte_order_of_the_arrays_does_not_matter() -> None:
    history = behaviours(BLOCK + 1)
    big = Behaviours(history.items.astype(">i8"), history.actions.astype(">u2"), history.timestamps_ms.astype(">i8"))
    assert digest_chain(FEATURES.astype(">i8"), big) == digest_chain(FEATURES, history)


def test_an_unequal_chain_of_the_same_length_is_no_match() -> None:
    length = BLOCK // 2
    ours = digest_chain(FEATURES, behaviours(length, seed=1))
    theirs = digest_chain(FEATURES, behaviours(length, seed=2))
    assert ours.common_length(theirs) == 0
    assert isinstance(ours, DigestChain)
