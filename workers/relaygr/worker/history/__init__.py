"""User histories in a worker: the LMDB store, the follower that fills it, and the version that a request gets.

docs/histories.md has the rules.

    follower, partitions     reads the logs of owned partitions; how far each is read and stored
    current                  marks partitions that are stored up to the ends of their logs
    decode, batches          records of both topics, and batches of them
    letters, tombstones      dead letters; deletions while the disk takes nothing
    store, tables            what the rest of the worker calls; keys and values of the tables
    apply, rules             the effect of a record on a stored history; `rules` is pure
    records                  the stored form of a history
    files, erasure           the files, and the compaction that erases deleted records
    snapshots                histories that the owner saves on the history topic
    resolve                  the history that a request is ranked with
"""
