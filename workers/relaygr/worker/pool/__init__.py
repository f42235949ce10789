"""The pool: a third tier of the prefix cache, in a store that workers share (docs/pool.md).

    stores      the stores, by the scheme of their URL, and their contract: has, put, get, remove, forget
    segments    how a prefix is cut into objects: their keys, pages and seals
    tier        reads objects into the DRAM tier, and writes them from there
    link        how long a fetch takes
    metrics     what the pool counts
    deletions   deletions that the store has still to carry out
    settings, build

The executor asks the tier (`fetch`), and the tier never asks the executor.
"""
