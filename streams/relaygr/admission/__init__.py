"""The decisions that trigger and workers share: which pre-infer jobs are admitted, and which requests are passed on.

    policy        whether an impression gets a pre-infer job
    buckets       how much pre-infer work each worker may be given
    latency       predicted device times, corrected while the worker runs
    risk          whether full inference would end in time
    lead          measured lead times
    divert        which ranking request an overloaded worker passes on, and to which worker
    worker_table  the workers that are known by their statuses, bounded
    scenarios     kinds of impressions, with limits and shares of their own

The trigger decides from the metadata of an event. Each worker decides again, with the state of its own cache. No module
does I/O.
"""
