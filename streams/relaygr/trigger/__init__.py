"""The sequence-aware trigger: decides from metadata alone which users' prefixes are computed ahead of ranking.

    policy    who is admitted: pure functions, shared with the worker's own re-check
    buckets   how much may be admitted: footprint in bytes × time, load in device time
    fleet     which worker owns a partition, and what it last said of itself
    app       the faust app: events in, pre-infer jobs out

Only `app` imports faust, so a worker can import the policy without it.
"""
