"""Checks our layers against test vectors of other implementations (docs/model.md, "Test vectors").

`stu_`, `cached_`: Meta's layers, whole and against a cache. `mask_`, `pos_`: masks and positions. `nv_`: NVIDIA's
attention. `research_`: the ICML'24 layer. `dlrm_`: Meta's whole ranking model. Cases that the engine can serve also run
through its own modules over pages, with pages and chunks of two sizes.
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
from relaygr.worker.model.vectors.masks import run_mask, run_pos
from relaygr.worker.model.vectors.nvidia import run_nv
from relaygr.worker.model.vectors.research import run_research
from relaygr.worker.model.vectors.stu import run_cached, run_stu

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
