"""The shared folder of a worker id: files on tmpfs that outlive the worker's process and have one writer at a time.

    <shared_path>/<worker_id>/
        lock                    held by the writer's process; freed when that process dies (`lock`)
        epoch                   the arena_epoch, which counts the holders of the lock (`lock`)
        fenced                  a note that the holder of the lock was fenced (`lock`)
        dram-<shape>            the pages of the DRAM tier, and nothing else (`dram_tier`)
        index-<shape>           key, page table and checksums of each prefix (`index`, `record`)
        finished                the watermark of finished offsets (`relaygr.consumer.finished`)
        admin.sock              the socket for operators (`relaygr.worker.admin_socket`); ends with the process
        supervisor, child-*     the supervisor's lock and socket, and its children (`relaygr.worker.supervisor.records`)

`dram_tier` combines the files for a worker. All of them survive a kill -9, since the kernel's page cache holds them.
They do not survive the machine: nothing is synced to a disk.

The order of writes keeps the index valid: **a prefix is removed from the index before any of its pages may be written,
and enters the index after its last byte was copied and checksummed.** So every prefix in the index is complete,
whenever the process dies. Checksums detect faults that the order cannot prevent: writes by other programs, and broken
memory.
"""
