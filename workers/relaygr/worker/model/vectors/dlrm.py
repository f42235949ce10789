"""`dlrm_`: Meta's whole ranking model, converted and run by the serving modules over pages.

A case holds embeddings instead of tables. Each of its rows becomes a separate item, or a separate value of a feature.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from relaygr.runtime.errors import RelayError
from relaygr.schemas.messages import Behaviours
from relaygr.worker.model.attention.spec import spec_of, torch_dtype
from relaygr.worker.model.config import ModelConfig
from relaygr.worker.model.convert.conversion import Converted, convert_state_dict
from relaygr.worker.model.convert.options import ConvertOptions, SourceFeature, SourceKind
from relaygr.worker.model.convert.state_dict import StateDict
from relaygr.worker.model.inputs.embedding import ITEM_FEATURE_ROWS, TokenEmbedding
from relaygr.worker.model.inputs.encodings import age_rows
from relaygr.worker.model.inputs.known import Vocabulary
from relaygr.worker.model.inputs.lookup import FeatureGates, TokenLookup
from relaygr.worker.model.inputs.tokens import Column
from relaygr.worker.model.layers import build_layers
from relaygr.worker.model.options import ComputeDtype, Task, TaskKind
from relaygr.worker.model.readout import Readout
from relaygr.worker.model.vectors.cases import (
    Checked,
    MalformedCaseError,
    NotUnderstoodError,
    VectorCase,
    alpha_of,
    compare,
    require_rows,
    slices,
)
from relaygr.worker.model.vectors.runs import PAGINGS, PagedLayers

_KNOWN = frozenset(
    {"contextual", "tasks", "post", "N", "dim", "heads", "layers", "norm_eps", "post_ln_eps", "swish_ln_eps"}
    | {"stu_contextual_seq_len", "use_group_norm", "alpha", "attn_alpha", "max_attn_len", "min_full_attn_seq_len"}
)
_WITH_TIME = "timestamp+layernorm"
_POSTS = ("layernorm", _WITH_TIME)
_ITEM = "item"
_GATED_FEATURE = "user_id"
_GATE_TOKENS = 4
"""The contextual token of the user id is hidden from sequences with fewer tokens of history and candidates."""
_MODULE_DEFAULT = "module default"
_MODULE_DEFAULT_EPS = 1e-5
_ACTION_WEIGHTS = (1, 2, 4)
"""The bits of actions, if no buffer holds them."""
_MS = 1000
_UNKNOWN = -1


@dataclass(frozen=True, slots=True)
class _Context:
    """A contextual feature: its number of tokens, and the rows of its embeddings for each user."""

    name: str
    tokens: int
    rows: list[range]


class _Served:
    """The modules of a served model."""

    def __init__(self, config: ModelConfig, tensors: dict[str, torch.Tensor], masked_context: int) -> None:
        self.gates = FeatureGates(config.contextual_features)
        self.lookup = TokenLookup(config, Vocabulary(config.vocabulary_size))
        self.embedding = TokenEmbedding(config, tensors)
        self.readout = Readout(config, tensors)
        spec = replace(spec_of(config, ComputeDtype.FLOAT32), contextual_tokens=masked_context)
        layers = build_layers(config, tensors, torch_dtype(ComputeDtype.FLOAT32))
        self.layers = PagedLayers(layers, spec)


def run_dlrm(case: VectorCase) -> list[Checked]:
    """The candidates' rows, their items' rows, and predictions."""
    case.require_known(_KNOWN)
    if case.option("post") not in _POSTS:
        raise NotUnderstoodError(f"option post={case.option('post')!r} is not known")
    histories, asked = case.lengths("uih_lengths"), case.lengths("num_candidates")
    items = [name.removeprefix("in/") for name in case.names("in/") if case.has(f"in/c_{name.removeprefix('in/')}")]
    if not items:
        raise MalformedCaseError("in/item or in/c_item is missing")
    items.sort(key=lambda name: name != _ITEM)
    require_rows(f"in/{items[0]}", case.floats(f"in/{items[0]}").shape[0], histories)
    contexts = _contexts(case, len(histories))
    converted = _converted(case, items, contexts)
    model = _Served(converted.config, dict(converted.tensors), case.whole("stu_contextual_seq_len", 0))
    checked = []
    for paging in PAGINGS:
        rows, tokens = [], []
        for user in _users(case, histories, asked, contexts):
            found = _rows_of(model, converted.config, user, paging)
            rows.append(found[0])
            tokens.append(found[1])
        last, own = torch.cat(rows), torch.cat(tokens)
        where = f"in pages of {paging[0]}"
        users, theirs = model.readout.user_rows(last, own), model.readout.item_rows(own)
        checked += [
            compare(f"candidates_user_embeddings {where}", users, case.floats("candidates_user_embeddings")),
            compare(f"candidates_item_embeddings {where}", theirs, case.floats("candidates_item_embeddings")),
            compare(f"preds {where}", model.readout(last, own).T, case.floats("preds")),
        ]
    return checked


@dataclass(frozen=True, slots=True)
class _UserRequest:
    """One user's request. Ids are rows of the case's embeddings."""

    features: NDArray[np.int64]
    behaviours: Behaviours
    candidates: NDArray[np.int64]
    candidate_times: NDArray[np.int64]


def _users(
    case: VectorCase, histories: list[int], asked: list[int], contexts: list[_Context]
) -> Iterator[_UserRequest]:
    times, asked_times = (case.integers(f"payload/{name}").numpy() for name in ("time", "c_time"))
    actions = case.integers("payload/action").numpy() if case.has("payload/action") else np.zeros_like(times)
    if actions.size and (actions.min() < 0 or actions.max() > np.iinfo(np.uint16).max):
        raise NotUnderstoodError("action codes beyond 16 bits are not known")
    first_candidate = sum(histories)
    parts = zip(slices(histories), slices(asked), strict=True)
    for user, (history, own) in enumerate(parts):
        yield _UserRequest(
            np.array([row for context in contexts for row in _values(context, user)], dtype=np.int64),
            Behaviours(
                np.arange(history.start, history.stop, dtype=np.int64),
                actions[history].astype(np.uint16),
                times[history] * _MS,
            ),
            np.arange(own.start, own.stop, dtype=np.int64) + first_candidate,
            asked_times[own],
        )


def _values(context: _Context, user: int) -> list[int]:
    """One value for each token; a missing value is unknown, and its embedding is zero."""
    rows = list(context.rows[user])[: context.tokens]
    return rows + [_UNKNOWN] * (context.tokens - len(rows))


def _rows_of(
    model: _Served, config: ModelConfig, user: _UserRequest, paging: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of the candidates after the last layer, and their tokens."""
    stamps = user.candidate_times if user.candidate_times.size else user.behaviours.timestamps_ms // _MS
    query_time = int(stamps[-1]) if stamps.size else 0
    features = model.gates.shown(user.features, len(user.behaviours), user.candidates.size)
    prefix = model.lookup.prefix(features, user.behaviours, query_time * _MS).tokens
    scored = model.lookup.scored(prefix.shape[0], Behaviours.empty(), user.candidates, query_time * _MS).tokens
    # A request has one query time. A case may have one for each candidate; ages are relative to the last of them.
    scored[:, Column.TIME] = user.candidate_times
    scored[:, Column.AGE] = age_rows(
        user.candidate_times, query_time, config.time_encoding, config.time_unit_seconds, config.num_times
    )
    x = model.embedding(np.concatenate((prefix, scored)))
    rows = model.layers.run(x, prefix.shape[0], user.candidates.size, *paging).rows
    return rows[prefix.shape[0] :], torch.from_numpy(scored)


def _converted(case: VectorCase, items: list[str], contexts: list[_Context]) -> Converted:
    """The case's weights and embeddings, converted from a state dict. Raises MalformedCaseError if one is missing."""
    tensors = {name.removeprefix("w/buffer/").removeprefix("w/"): case.floats(name) for name in case.names("w/")}
    tables = {name: torch.cat((case.floats(f"in/{name}"), case.floats(f"in/c_{name}"))) for name in items}
    tensors |= {f"_embedding_collection.embeddings.{name}.weight": table for name, table in tables.items()}
    rows = torch.arange(tables[items[0]].shape[0] + 1)
    tensors |= {ITEM_FEATURE_ROWS.format(index): rows for index in range(len(items) - 1)}
    for context in contexts:
        tensors[f"_embedding_collection.embeddings.{context.name}.weight"] = case.floats(f"in/{context.name}")
    options = ConvertOptions(
        heads=case.whole("heads"),
        normalizer=case.number("N"),
        eps=case.number("norm_eps"),
        alpha=alpha_of(case),
        max_attn_len=case.whole("max_attn_len", 0),
        min_full_attn_len=case.whole("min_full_attn_seq_len", 0),
        action_weights=_ACTION_WEIGHTS,
        tasks=_tasks(case),
        features=tuple(_source_feature(context) for context in contexts),
        item_features=tuple(items[1:]),
        tables={"item": items[0]},
    )
    try:
        converted = convert_state_dict(StateDict(tensors), SourceKind.META, options, case.name)
    except RelayError as error:
        raise MalformedCaseError(str(error)) from error
    missing = [missing.looked_for for missing in converted.report.missing]
    if missing:
        raise MalformedCaseError(f"missing: {', '.join(missing)}")
    if bool(converted.config.readout_periods) != (case.option("post") == _WITH_TIME):
        raise MalformedCaseError(f"post is {case.option('post')}, the weights are for another one")
    return replace(converted, config=_with_eps(case, converted.config))


def _source_feature(context: _Context) -> SourceFeature:
    least = _GATE_TOKENS if context.name == _GATED_FEATURE else 0
    return SourceFeature(name=context.name, tokens=context.tokens, min_tokens=least)


def _with_eps(case: VectorCase, config: ModelConfig) -> ModelConfig:
    """The configuration with the epsilons of the case, which a state dict does not contain."""
    eps = {"readout_norm_eps": _eps(case, "post_ln_eps"), "swish_norm_eps": _eps(case, "swish_ln_eps")}
    return config.model_copy(update=eps)


def _eps(case: VectorCase, name: str) -> float:
    return _MODULE_DEFAULT_EPS if case.option(name, _MODULE_DEFAULT) == _MODULE_DEFAULT else case.number(name)


def _tasks(case: VectorCase) -> tuple[Task, ...]:
    tasks = []
    for text in case.option("tasks"):
        name, _, kind = str(text).rpartition(":")
        if kind not in list(TaskKind):
            raise NotUnderstoodError(f"option tasks={case.option('tasks')!r} has a kind that is not known")
        tasks.append(Task(name=name or kind, kind=TaskKind(kind)))
    return tuple(tasks)


def _contexts(case: VectorCase, users: int) -> list[_Context]:
    """Contextual features in order, from a list of names, or from a mapping of names to numbers of tokens."""
    told = case.option("contextual", [])
    sizes = dict(told) if isinstance(told, dict) else {}
    names = [str(name) for name in told]
    rows = {name: _ranges(case, name, users) for name in names}
    longest = {name: max((len(own) for own in rows[name]), default=0) for name in names}
    tokens = {name: int(sizes.get(name, max(1, longest[name]))) for name in names}
    linear = "w/_hstu_transducer._input_preprocessor._batched_contextual_linear_weights"
    if names and case.has(linear) and case.array(linear).shape[0] != sum(tokens.values()):
        raise NotUnderstoodError(
            f"option contextual={told!r} does not give the number of tokens of each: "
            f"{case.array(linear).shape[0]} in total, the embeddings have {tokens}"
        )
    return [_Context(name, tokens[name], rows[name]) for name in names]


def _ranges(case: VectorCase, name: str, users: int) -> list[range]:
    """The rows of a feature's embeddings for each user: by lengths or offsets, else the same number for all users."""
    count = case.floats(f"in/{name}").shape[0]
    lengths = next((found for found in case.names() if found.endswith(f"/{name}_lengths")), None)
    offsets = next((found for found in case.names() if found.endswith(f"/{name}_offsets")), None)
    if lengths is not None:
        own = case.lengths(lengths)
    elif offsets is not None:
        own = np.diff(case.integers(offsets).numpy()).tolist()
    elif users and count % users == 0:
        own = [count // users] * users
    else:
        raise NotUnderstoodError(f"contextual feature {name} has {count} embeddings for {users} users, and no lengths")
    if len(own) != users or sum(own) != count:
        raise MalformedCaseError(f"in/{name} has {count} rows, its lengths {own} do not fit {users} users")
    return [range(part.start, part.stop) for part in slices(own)]
