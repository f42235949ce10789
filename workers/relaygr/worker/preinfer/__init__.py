"""A pre-infer worker: it owns no partitions, and computes prefixes for the owners (docs/pool.md).

    decision    what becomes of a job, and how long jobs take: pure
    source      jobs from a share group, or from an ordinary group
    slots       one thread for each job that is under way

The history follower, the executor and the pool are those of every worker.
"""
