"""What outlives a worker process: one folder per worker id, on tmpfs, and one writer.

    <shared_path>/<worker_id>/
        lock                    held by the writer's process; its death frees it (`lock`)
        epoch                   the arena_epoch: counts holders of the lock (`lock`)
        dram-<shape>            the DRAM tier's pages, and nothing else (`dram_file`)
        index-<shape>           which prefix lies in which pages, with checksums (`index`, `record`)
        finished                the watermark of finished offsets (`relaygr.consumer.finished`)

`arena` puts them together for a worker. A kill -9 keeps all of it, since the page cache is the kernel's; a
machine that goes down empties it, and nothing of it is synced to a disk.

The rule that makes it safe: **a prefix is removed from the index before any of its pages may be written, and
enters the index after its last byte was copied and checksummed.** So whenever the process dies, every prefix in
the index is whole. Checksums are held against faults that no rule prevents: foreign writes, broken memory.
"""
