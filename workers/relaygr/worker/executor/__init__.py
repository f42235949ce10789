"""The executor: serves pre-infer jobs and ranking requests with history, cache and device (docs/scheduling.md).

    executor, thread          the steps; the device thread and its watchdog
    requests -> look_up -> serving -> batches -> ends    a request, from its receipt to its one result
    jobs, warm_up             a job; what an idle device computes
    prefixes, reloads         prefixes under computation, and their chunks; copies from DRAM and the pool
    capacity                  the time of the device thread; `order` says what runs next
    resolver, impressions     what a message names; what is known of its impression
    waits                     timers, and waits for histories
    work, events              the data of all these, and what happens to them
    measured, backlog, order, routes, chunks, job_admission    pure decisions

One thread at a time calls `Executor.step`: the device thread in a loop and, for short work on a CPU, the poll thread.
In this package "the device thread" means the one that runs the step. Imports go one way
(`tests/workers/test_executor_prefixes.py` has the order).
"""
