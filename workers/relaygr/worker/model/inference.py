"""Full inference of one request, without cache and executor: for trials, score errors and comparisons."""

from __future__ import annotations

from dataclasses import dataclass, field

from relaygr.schemas.messages import Behaviours
from relaygr.worker.model.interface import Engine, Int32Array, Int64Array, PrefixChunk, RankInputs, RankOutputs


@dataclass(frozen=True, slots=True)
class FullRequest:
    """Features int64 as stored, the behaviours of the prefix, and those of the suffix; the candidates' ids."""

    features: Int64Array
    prefix: Behaviours
    candidates: Int64Array
    query_time_ms: int
    suffix: Behaviours = field(default_factory=Behaviours.empty)


@dataclass(frozen=True, slots=True)
class Inference:
    """The result of `full_inference`. `ranked` can be ranked again on the same pages."""

    outputs: RankOutputs
    ranked: RankInputs
    unknown_items: int


def full_inference(
    engine: Engine, request: FullRequest, pages: Int32Array, chunk_tokens: int | None = None, chunks: int = 1
) -> Inference:
    """Computes the prefix into `pages`, from the first one, and ranks the candidates on it.

    The prefix is computed in at least `chunks` chunks of at most `chunk_tokens`, None: of any size; in one if the model
    allows no chunks. Raises TooLongError beyond the model's limits, ValueError for too few pages.
    """
    prefix = request.prefix
    behaviours = len(prefix) + len(request.suffix)
    features = engine.shown_features(request.features, behaviours, int(request.candidates.size))
    inputs = engine.prefix_inputs(features, prefix, request.query_time_ms)
    step = max(1, inputs.tokens)
    if engine.rules.chunks:
        step = min(chunk_tokens or step, -(-step // chunks))
    for start in range(0, inputs.tokens, step):
        engine.pre_infer(PrefixChunk(inputs, start, min(start + step, inputs.tokens), pages))
    ranked = engine.rank_inputs(
        inputs.tokens, pages, request.suffix, request.candidates, request.query_time_ms, prefix.timestamps_ms
    )
    (outputs,) = engine.rank([ranked])
    return Inference(outputs, ranked, inputs.unknown_items + ranked.unknown_items)
