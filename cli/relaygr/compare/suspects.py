"""The usual causes of different scores that are tried one by one: options of the conversion, and contents of the file.

Each function gives the trials of one cause. `search.py` adds the causes whose values follow from measurements: N, and
features that are hidden from short sequences.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import torch

from relaygr.compare.requests import Request
from relaygr.compare.trial import Change, Trial
from relaygr.schemas.messages import Behaviours
from relaygr.worker.model.config import ModelConfig
from relaygr.worker.model.convert.parts import contiguous_columns
from relaygr.worker.model.options import (
    Activated,
    InputForm,
    OutputForm,
    ReadoutActivation,
    ReadoutForm,
    TaskKind,
    TimeEncoding,
)

_MOST_HEADS = 64
_TIME_UNITS_SECONDS = (1.0, 60.0, 3600.0, 86_400.0)
_LOG_BASES = (0.301, 0.6931, 1.0, 2.3026)
_GROUPS = (2, 4, 8, 16)
_MOST_PAIRS = 15
_LARGEST_ACTION = np.iinfo(np.uint16).max
_MOST_BITS = 16


def heads(trial: Trial) -> Iterator[Trial]:
    """Other numbers of heads. Group norm has one weight for each head, so its number is known."""
    config = trial.config
    if config.group_norm:
        return
    attention, hidden = config.num_heads * config.attention_dim, config.num_heads * config.hidden_dim
    for count in range(1, _MOST_HEADS + 1):
        if count == config.num_heads or attention % count or hidden % count:
            continue
        change = Change(f"heads {count} instead of {config.num_heads}", f"convert with --heads {count}")
        sizes = {"num_heads": count, "attention_dim": attention // count, "hidden_dim": hidden // count}
        yield trial.configured(change, **sizes)
        if _has_head_layouts(config):
            change = Change(f"{change.text}, columns of each head together", change.remedy)
            yield trial.converted(change, _reordered(trial, config.num_heads, count), **sizes)


def projection_order(trial: Trial) -> Iterator[Trial]:
    """The other order of the joint projection's columns."""
    if _has_head_layouts(trial.config) and trial.config.num_heads > 1:
        told = "convert with --projection {}"
        change = Change("columns of each head together", told.format("per_head"))
        yield trial.converted(change, _reordered(trial, None, trial.config.num_heads))
        change = Change("columns of all heads together", told.format("contiguous"))
        yield trial.converted(change, _reordered(trial, trial.config.num_heads, None))


def _has_head_layouts(config: ModelConfig) -> bool:
    """Whether the model has NVIDIA's form, whose layers are saved with two orders of columns."""
    return config.activated is Activated.UVQK and config.norm_affine and config.output_form is OutputForm.UNORM


def _reordered(trial: Trial, before: int | None, after: int | None) -> dict[str, torch.Tensor]:
    """The projections, with the order for `before` heads undone and the order for `after` heads made."""
    config = trial.config
    attention, hidden = config.num_heads * config.attention_dim, config.num_heads * config.hidden_dim
    columns = torch.arange(config.projection_width)
    if before is not None:
        columns = torch.argsort(contiguous_columns(before, attention // before, hidden // before).apply(columns))
    if after is not None:
        columns = contiguous_columns(after, attention // after, hidden // after).apply(columns)
    return {
        name: tensor[..., columns].contiguous()
        for name, tensor in trial.checkpoint.tensors.items()
        if name.startswith("layers.") and ".projection." in name
    }


def alpha(trial: Trial) -> Iterator[Trial]:
    """Other scales of q.k."""
    config = trial.config
    for value in sorted({1.0, config.attention_dim**-0.5, config.hidden_dim**-0.5, config.embedding_dim**-0.5}):
        if not np.isclose(value, config.alpha):
            change = Change(f"q.k times {value:.6g} instead of {config.alpha:.6g}", f"convert with --alpha {value:.8g}")
            yield trial.configured(change, attn_alpha=value)


def contextual_mask(trial: Trial) -> Iterator[Trial]:
    """Contextual tokens that see the whole history, or do not."""
    if trial.config.contextual_features:
        option = "--no-contextual-mask" if trial.config.contextual_mask else "--contextual-mask"
        change = Change(option.removeprefix("--").replace("-", " "), f"convert with {option}")
        yield trial.configured(change, contextual_mask=not trial.config.contextual_mask)


def target_groups(trial: Trial) -> Iterator[Trial]:
    """Candidates that see each other."""
    if trial.config.inputs is InputForm.DLRM or trial.config.relative_bias is not None:
        return
    most = max(int(request.candidates.size) for request in trial.requests)
    for size in sorted({1, *_GROUPS, most}):
        if size != trial.config.target_group_size and size <= most:
            change = Change(f"candidates in groups of {size}", f"convert with --target-group-size {size}")
            yield trial.configured(change, target_group_size=size)


def activation(trial: Trial) -> Iterator[Trial]:
    """Other activations in the task MLP."""
    config = trial.config
    if config.readout is ReadoutForm.ROW and config.readout_hidden:
        for value in (ReadoutActivation.SILU, ReadoutActivation.RELU, ReadoutActivation.GELU):
            if value is not config.readout_activation:
                change = Change(f"{value} in the task MLP", f"convert with --activation {value}")
                yield trial.configured(change, readout_activation=value)


def embedding_scale(trial: Trial) -> Iterator[Trial]:
    """Tokens times the square root of D, or not."""
    for value in (1.0, float(trial.config.embedding_dim) ** 0.5):
        if not np.isclose(value, trial.config.embedding_scale):
            change = Change(f"tokens times {value:.6g}", f'set "embedding_scale": {value:.8g} in config.json')
            yield trial.configured(change, embedding_scale=value)


def log_base(trial: Trial) -> Iterator[Trial]:
    """Other bases of the bias by time."""
    bias = trial.config.relative_bias
    if bias is not None and bias.time_buckets:
        for value in _LOG_BASES:
            if not np.isclose(value, bias.log_base):
                change = Change(f"base {value} of the bias by time", f"convert with --log-base {value}")
                yield trial.configured(change, relative_bias=bias.model_copy(update={"log_base": value}))


def ages(trial: Trial) -> Iterator[Trial]:
    """Other units and functions of ages, and the clamp of Meta's CPU reference."""
    config = trial.config
    if not config.num_times:
        return
    for unit, encoding in itertools.product(_TIME_UNITS_SECONDS, (TimeEncoding.SQRT, TimeEncoding.LOG)):
        if (unit, encoding) != (config.time_unit_seconds, config.time_encoding):
            remedy = f'set "time_unit_seconds": {unit:g} and "time_encoding": "{encoding}" in config.json'
            change = Change(f"ages as the {encoding} of units of {unit:g} s", remedy)
            yield trial.configured(change, time_unit_seconds=unit, time_encoding=encoding)
    width = config.embedding_dim
    if width < config.num_times:
        change = Change(
            f"ages limited to the time table's width, {width}",
            "nothing to change: Meta's CPU reference (pt_position.py) limits ages to the width of the time table, its "
            "GPU code to the rows; write the scores on a GPU",
        )
        yield trial.converted(
            change, {"times.weight": trial.checkpoint.tensors["times.weight"][:width]}, num_times=width
        )


def times_of_the_file(trial: Trial) -> Iterator[Trial]:
    """Times in another unit, or another query time."""

    def with_times(request: Request, scaled: Callable[[np.ndarray], np.ndarray]) -> Request:
        own = request.behaviours
        query_time_ms = int(scaled(np.array([request.query_time_ms]))[0])
        times = scaled(own.timestamps_ms)
        return replace(request, behaviours=Behaviours(own.items, own.actions, times), query_time_ms=query_time_ms)

    if not _uses_times(trial.config):
        return
    change = Change("times of the file as seconds", "multiply timestamps_ms and query_time_ms by 1,000")
    largest = max(abs(request.query_time_ms) for request in trial.requests)
    if largest < np.iinfo(np.int64).max // 1_000_000:
        yield trial.asked(change, lambda request: with_times(request, lambda times: times * 1000))
    change = Change("times of the file as microseconds", "divide timestamps_ms and query_time_ms by 1,000")
    yield trial.asked(change, lambda request: with_times(request, lambda times: times // 1000))

    def at_last(request: Request) -> Request:
        times = request.behaviours.timestamps_ms
        return replace(request, query_time_ms=int(times[-1])) if times.size else request

    yield trial.asked(Change("query time of the last behaviour", "put that time into query_time_ms"), at_last)


def _uses_times(config: ModelConfig) -> bool:
    has_bias = config.relative_bias is not None and config.relative_bias.time_buckets > 0
    return bool(has_bias or config.num_times or config.readout_periods)


def ids_of_the_file(trial: Trial) -> Iterator[Trial]:
    """Item ids that begin at another number."""
    for step in (-1, 1):

        def shifted(request: Request, step: int = step) -> Request:
            own = request.behaviours
            moved = Behaviours(own.items + step, own.actions, own.timestamps_ms)
            return replace(request, behaviours=moved, candidates=request.candidates + step)

        told = f"{'add 1 to' if step > 0 else 'subtract 1 from'} the file's item ids, or convert with --items"
        yield trial.asked(Change(f"item ids {step:+}", told), shifted)


def actions_of_the_file(trial: Trial) -> Iterator[Trial]:
    """Action codes that begin at another number, or that are bit numbers instead of bits."""
    config = trial.config
    if not (config.num_actions or (config.dlrm_inputs is not None and config.dlrm_inputs.action_weights)):
        return

    def with_codes(request: Request, codes: np.ndarray) -> Request:
        own = request.behaviours
        limited = np.clip(codes, 0, _LARGEST_ACTION).astype(np.uint16)
        return replace(request, behaviours=Behaviours(own.items, limited, own.timestamps_ms))

    for step in (-1, 1):
        change = Change(f"action codes {step:+}", f"{'add 1 to' if step > 0 else 'subtract 1 from'} the file's actions")

        def shifted(request: Request, step: int = step) -> Request:
            return with_codes(request, request.behaviours.actions.astype(np.int64) + step)

        yield trial.asked(change, shifted)
    largest = max((int(request.behaviours.actions.max(initial=0)) for request in trial.requests), default=0)
    if config.inputs is InputForm.DLRM and largest < _MOST_BITS:
        change = Change("action codes as numbers of bits", "write 1 << code as the action")
        yield trial.asked(change, lambda request: with_codes(request, 1 << request.behaviours.actions.astype(np.int64)))


def order_of_the_history(trial: Trial) -> Iterator[Trial]:
    """Histories that begin with the newest behaviour."""

    def reversed_history(request: Request) -> Request:
        own = request.behaviours
        return replace(
            request,
            behaviours=Behaviours(own.items[::-1].copy(), own.actions[::-1].copy(), own.timestamps_ms[::-1].copy()),
        )

    yield trial.asked(Change("histories in reverse order", "write the oldest behaviour first"), reversed_history)


def features(trial: Trial) -> Iterator[Trial]:
    """Contextual features in another order, or with the table or values of another one."""
    described = trial.config.contextual_features
    starts = np.cumsum([0] + [feature.tokens for feature in described])
    for i, j in _pairs(len(described)):
        names = f"{described[i].name} and {described[j].name}"

        def swapped_values(request: Request, i: int = i, j: int = j) -> Request:
            parts = np.split(request.features, starts[1:-1])
            parts[i], parts[j] = parts[j], parts[i]
            return replace(request, features=np.concatenate(parts))

        tables = _swapped(trial, f"features.{i}.weight", f"features.{j}.weight")
        ordered = list(described)
        ordered[i], ordered[j] = ordered[j], ordered[i]
        told = " ".join(f"--feature {feature.name}" for feature in ordered)
        change = Change(f"{names} change places", f"convert with {told}, in this order", f"order of {names}")
        yield trial.converted(change, tables, contextual_features=tuple(ordered)).asked(change, swapped_values)
        if described[i].tokens == described[j].tokens:
            change = Change(f"values of {names} exchanged", f"exchange the values of {names} in the file")
            yield trial.asked(change, swapped_values)
        if described[i].cardinality == described[j].cardinality:
            change = Change(f"tables of {names} exchanged", f"exchange the tables of {names} in --table")
            yield trial.converted(change, tables)


def item_features(trial: Trial) -> Iterator[Trial]:
    """Features of items in another order, or with the table or values of another one."""
    inputs = trial.config.dlrm_inputs
    described = () if inputs is None else inputs.item_features
    for i, j in _pairs(len(described)):
        names = f"{described[i].name} and {described[j].name}"
        tables = _swapped(trial, f"item_features.{i}.weight", f"item_features.{j}.weight")
        values = _swapped(trial, f"item_features.{i}.rows", f"item_features.{j}.rows")
        ordered = list(described)
        ordered[i], ordered[j] = ordered[j], ordered[i]
        told = " ".join(f"--item-feature {feature.name}" for feature in ordered)
        change = Change(f"{names} change places", f"convert with {told}, in this order")
        assert inputs is not None
        yield trial.converted(
            change, tables | values, dlrm_inputs=inputs.model_copy(update={"item_features": tuple(ordered)})
        )
        if described[i].cardinality == described[j].cardinality:
            change = Change(f"values of {names} exchanged", f"exchange the files of {names} in --item-values")
            yield trial.converted(change, values)
            change = Change(f"tables of {names} exchanged", f"exchange the tables of {names} in --table")
            yield trial.converted(change, tables)


def item_table(trial: Trial) -> Iterator[Trial]:
    """The item table exchanged with one of the same shape."""
    tensors = trial.checkpoint.tensors
    own = tensors.get("items.weight")
    others = [f"features.{k}.weight" for k in range(len(trial.config.contextual_features))]
    inputs = trial.config.dlrm_inputs
    others += [f"item_features.{k}.weight" for k in range(0 if inputs is None else len(inputs.item_features))]
    names = [feature.name for feature in trial.config.contextual_features]
    names += [] if inputs is None else [feature.name for feature in inputs.item_features]
    for name, other in zip(names[:_MOST_PAIRS], others, strict=False):
        if own is not None and tensors[other].shape == own.shape:
            text = f"the tables of item and {name}"
            change = Change(f"{text} exchanged", f"exchange {text} in --table")
            yield trial.converted(change, _swapped(trial, "items.weight", other))


def _pairs(count: int) -> Iterator[tuple[int, int]]:
    return itertools.islice(itertools.combinations(range(count), 2), _MOST_PAIRS)


def _swapped(trial: Trial, first: str, second: str) -> dict[str, torch.Tensor]:
    tensors = trial.checkpoint.tensors
    return {first: tensors[second], second: tensors[first]}


def tasks(trial: Trial) -> Iterator[Trial]:
    """Columns of the scores that are exchanged, logits for probabilities, and the other way round."""
    described = trial.config.tasks
    for i, j in _pairs(len(described)):

        def exchanged(request: Request, i: int = i, j: int = j) -> Request:
            scores = request.scores.copy()
            scores[:, [i, j]] = scores[:, [j, i]]
            return replace(request, scores=scores)

        names = f"{described[i].name} and {described[j].name}"
        yield trial.asked(Change(f"tasks {names} exchanged", f"exchange {names} in --task, or in the file"), exchanged)
    for chosen in dict.fromkeys([tuple(range(len(described))), *((k,) for k in range(len(described)))]):
        other = {TaskKind.BINARY: TaskKind.REGRESSION, TaskKind.REGRESSION: TaskKind.BINARY}
        changed = [
            task.model_copy(update={"kind": other[task.kind]}) if k in chosen else task
            for k, task in enumerate(described)
        ]
        told = " ".join(f"--task {changed[k].name}:{changed[k].kind}" for k in chosen)
        text = ", ".join(f"{changed[k].name} is {changed[k].kind}" for k in chosen)
        remedy = f"convert with {told}, or write scores {'before' if 'binary' in told else 'after'} the sigmoid"
        yield trial.configured(Change(text, remedy), tasks=tuple(changed))


SUSPECTS: tuple[Callable[[Trial], Iterator[Trial]], ...] = (
    heads,
    projection_order,
    contextual_mask,
    tasks,
    features,
    item_features,
    item_table,
    ids_of_the_file,
    actions_of_the_file,
    order_of_the_history,
    times_of_the_file,
    ages,
    target_groups,
    activation,
    alpha,
    embedding_scale,
    log_base,
)
