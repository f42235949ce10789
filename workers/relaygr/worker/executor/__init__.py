"""The executor: serves pre-infer jobs and ranking requests with history, cache and device (docs/scheduling.md).

    executor, thread   the steps; the device thread and its watchdog
    requests, jobs     the state machines; `events` is what happens to them, `work` their data
    prefixes, batches  prefixes under computation, and their chunks; ranking passes
    reloads            copies from DRAM and the pool, and waits for room in HBM
    resolver           from a message to its history, prefix and cache key
    warm_up            what an idle device computes
    observations       what ended requests tell to predictions, triggers and metrics
    measured           the figures that admission needs, from finished work
    order, backlog, routes, chunks, arrivals, job_admission   pure decisions

One thread at a time calls `Executor.step`: the device thread in a loop and, for short work on a CPU, the poll thread.
In this package "the device thread" means the one that runs the step. Imports go one way: `executor` imports `batches`,
which imports `requests`; `requests`, `jobs` and `warm_up` import `prefixes`, which imports none of them.
"""
