"""Runs a module with the attention of CUDA on Triton's interpreter, which the tests use, too.

python -m tests.worlds.interpreted MODULE [ARGUMENT ...]
"""

import runpy
import sys

from relaygr.worker.model.attention import choose
from tests.worlds.triton import choose_triton

choose.accelerated_attention = choose_triton
del sys.argv[0]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
