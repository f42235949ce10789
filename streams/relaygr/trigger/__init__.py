"""The trigger: decides from metadata which users' prefixes are computed before the ranking request.

    app           the process: events in, pre-infer jobs out
    faust_stream  faust as the trigger runs it, and the consumer that feeds its channel
    handler       one event in, one decision out; no I/O
    users         what is remembered of each user: its last event and job, and how soon users come back
    tail          the newest jobs of partitions that were just assigned, from which that is rebuilt
    policies      who decides, by name
    fleet         the owner of each partition, from the statuses of the workers

The policy and its buckets are in `relaygr.admission`. Only `app` and `faust_stream` import faust.
"""
