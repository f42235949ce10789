"""Attention on CPUs as machine code that LLVM compiles at load (the extra `compiled`).

    form            what the code is compiled for, and what it is given: widths, blocks, arguments
    emit            functions, loops, integers and memory, written through llvmlite
    silu, pairs     SiLU; bfloat16 in pairs
    kernel          the loops of attention
    machine_code    compiles them
    attention       the part that torch code calls (used by `model.attention.blocked`)

`form` and `attention` import no llvmlite.
"""
