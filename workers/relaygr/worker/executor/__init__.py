"""The executor: serves pre-infer jobs and ranking requests with history, cache and device.

One thread at a time calls `Executor.step`: the device thread in a loop and, for short work on a CPU, the poll thread
(`thread`). In this package "the device thread" means the one that runs the step. Other threads post calls.

Imports go one way: `executor` imports `batches`, `batches` imports `requests`; `requests`, `jobs` and `warm_up` import
`prefixes`, which imports none of them. docs/scheduling.md describes modules, states and rules.
"""
