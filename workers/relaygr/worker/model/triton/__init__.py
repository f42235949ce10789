"""The CUDA kernels, written in Triton. `plan` imports neither torch nor Triton; every other module imports Triton."""
