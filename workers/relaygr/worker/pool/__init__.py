"""The pool: a third tier of the prefix cache, in a store that workers share (docs/pool.md).

    store       the contract of a store: has, put, get, forget
    mooncake    the store on Mooncake Store
    segments    how a prefix is cut into objects: their keys, pages and seals
"""
