"""The executor: serves pre-infer jobs and ranking requests with history, cache and device.

One thread at a time calls `Executor.step`: the device thread in a loop and, for short work on a CPU, the poll thread
(`thread`). In this package "the device thread" means the one that runs the step. Other threads post to its mailbox. A
step runs the mailbox, then the timers that are due, then one piece of device work: one chunk of one prefix,
or one batch of ranking requests. So no request waits behind more than one piece of work.

Full inference has no code path of its own: it is the chunks of a prefix, followed by a ranking pass. Its K,V are
published if the cache has room.

    thread      the device thread and its watchdog
    executor    the loop; it handles the events of prefixes
    requests    ranking requests: look up, plan, wait, write the result
    jobs        pre-infer jobs: look up, reload or compute, lease
    warm_up     prefixes of likely users, computed on an idle device
    prefixes    prefixes under computation, and their chunks on the device
    batches     ranking passes
    context     the parts that these share; timers and wait queues
    work        the data of jobs, requests and prefixes, and the memory that they hold
    resolver    from a message to its history, prefix and cache key
    admission   which jobs are admitted
    order       which work is next, and whether more can end in time (pure)
    plan        how a request is served in its time, how prefixes are cut into chunks, when requests may arrive (pure)

Imports go one way: `executor` imports `batches`, `batches` imports `requests`; `requests`, `jobs` and `warm_up` import
`prefixes`. `prefixes` imports none of them: it appends events, which the executor handles after each call.
"""
