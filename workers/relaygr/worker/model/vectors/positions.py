"""`pos_`: positions from the end and time buckets, by the look-ups that a served model's inputs use."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from relaygr.worker.model.inputs.places import FromEnd
from relaygr.worker.model.inputs.times import age_rows
from relaygr.worker.model.options import TimeEncoding
from relaygr.worker.model.vectors.cases import (
    Case,
    Checked,
    NotUnderstoodError,
    compare,
    compare_exactly,
    require_rows,
    slices,
)

_KNOWN = frozenset({"N", "contextual", "fn", "seconds_per_unit"})
_FUNCTIONS = {"sqrt": TimeEncoding.SQRT, "log": TimeEncoding.LOG}


def run_pos(case: Case) -> list[Checked]:
    """Rows of the position table, and embeddings with positions and times added."""
    case.require_known(_KNOWN)
    lengths = case.lengths()
    targets = case.targets(len(lengths), lengths)
    emb, pos, times = case.floats("emb"), case.floats("pos"), case.floats("ts_w")
    stamps = case.integers("timestamps").numpy()
    require_rows("emb", emb.shape[0], lengths)
    require_rows("timestamps", stamps.shape[0], lengths)
    encoding = _FUNCTIONS.get(str(case.option("fn", "sqrt")))
    if encoding is None:
        raise NotUnderstoodError(f"option fn={case.option('fn')!r} is not known")
    contextual, size = case.whole("contextual", 0), case.whole("N")
    seconds = case.number("seconds_per_unit", 60.0)
    places = FromEnd(pos.shape[0], contextual)
    indices, out = [], []
    for user, own in enumerate(slices(lengths)):
        length = own.stop - own.start
        history = length if targets is None else length - targets[user]
        index = _padded(places, history, size, contextual)
        indices.append(index)
        own_stamps = stamps[own]
        query = int(own_stamps[-1]) if length else 0
        ages = age_rows(own_stamps, query, encoding, seconds, times.shape[0])
        added = pos[torch.from_numpy(index[:length])] + times[torch.from_numpy(ages)]
        out.append(emb[own] + added)
    checked = [compare("out", torch.cat(out), case.floats("out"))]
    if case.has("pos_index"):
        ours, expected = torch.from_numpy(np.stack(indices)), case.integers("pos_index")
        if targets is None and ours.shape == expected.shape:
            # Without targets, padding stands behind the end and has no place.
            padding = torch.arange(size)[None, :] >= torch.tensor(lengths)[:, None]
            ours, expected = ours.masked_fill(padding, 0), expected.masked_fill(padding, 0)
        checked.append(compare_exactly("pos_index", ours, expected))
    return checked


def _padded(places: FromEnd, history: int, size: int, contextual: int) -> NDArray[np.int64]:
    """int64 [size]: a sequence's places; what lies behind its history stands where targets stand."""
    index = np.concatenate((places.of_prefix(history), places.of_scored(history, 0, size - history)))
    # Contextual tokens count from the start even where a sequence is too short to have them all.
    index[:contextual] = np.arange(min(contextual, size))
    return index
