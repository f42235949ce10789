"""The door for a ranker of your own: subclass `Ranker` or `PagedRanker`, and name it in its folder's `config.json`.

docs/rankers.md is the way from an `nn.Module` to the relay. What is exported here is stable.
"""

from relaygr.ranker.interface import Computed, History, Kv, ModelFolder, Past, Ranker, RankerBase, Shape
from relaygr.ranker.paged import CandidateInputs, HistoryInputs, PagedRanker
from relaygr.worker.model.attention.segments import Segment
from relaygr.worker.model.interface import PrefixChunk, PrefixInputs, RankInputs

__all__ = [
    "CandidateInputs",
    "Computed",
    "History",
    "HistoryInputs",
    "Kv",
    "ModelFolder",
    "PagedRanker",
    "Past",
    "PrefixChunk",
    "PrefixInputs",
    "RankInputs",
    "Ranker",
    "RankerBase",
    "Segment",
    "Shape",
]
