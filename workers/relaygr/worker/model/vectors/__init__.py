"""Checks our layers against test vectors of other implementations (docs/model.md, "Test vectors").

    stu_        Meta's layers: `x` to `y` and `per_layer`; contextual mask, windows, group norm, not target-aware
    cached_     the same in two passes: the prefix's rows and K,V, then the other rows against them
    mask_       Meta's masks, whole and in the tiles that attention uses
    pos_        positions from the end and time buckets, by the look-ups of the engine
    nv_         NVIDIA's attention: target groups, contextual tokens per user
    research_   the ICML'24 layer with relative bias of position and time
    dlrm_       Meta's whole DLRM-v3 ranking model, converted: from embeddings to predictions

Cases that the engine can serve run through its modules, with pages and chunks of two sizes; `stu_` and `cached_` also
run through a dense pass. `stu_` and `nv_` cases with `causal` false or missing contextual tokens run through the dense
pass only. `concat_ua` does not tell whether A is before or after its norm; the reading with the smaller error counts.
"""

from relaygr.worker.model.vectors.cases import (
    TOLERANCE,
    CaseResult,
    CaseRunner,
    CaseVerdict,
    VectorCase,
    check_case,
    read_vectors,
)
from relaygr.worker.model.vectors.dlrm import run_dlrm
from relaygr.worker.model.vectors.layers import run_cached, run_research, run_stu
from relaygr.worker.model.vectors.masks import run_mask, run_pos
from relaygr.worker.model.vectors.nvidia import run_nv

__all__ = ["KINDS", "TOLERANCE", "CaseResult", "CaseRunner", "CaseVerdict", "VectorCase", "check_case", "read_vectors"]

KINDS: dict[str, CaseRunner] = {
    "stu_": run_stu,
    "cached_": run_cached,
    "mask_": run_mask,
    "pos_": run_pos,
    "nv_": run_nv,
    "research_": run_research,
    "dlrm_": run_dlrm,
}
"""The kinds of cases: the beginning of a case's name selects its runner."""
