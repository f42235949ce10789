"""The CUDA kernels, written in Triton.

    attention_kernels   `attend_kernel`, `store_kernel`
    norm_kernels        norms, gates and concatenation around the products, in one pass each (used by `model.fused`)
    plan                division of a forward into programs, in numpy
    launch              checks of shapes, block sizes, configurations for tuning
    attention           the back end (`AttentionBackend` of `model.attention.interface`), warm-up

`plan` imports neither torch nor Triton; every other module imports Triton.
"""
