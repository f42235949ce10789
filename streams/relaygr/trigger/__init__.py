"""The trigger: decides from metadata which users' prefixes are computed before the ranking request.

    app           the process: events in, pre-infer jobs out
    faust_stream  faust as the trigger runs it, and the consumer that feeds its channel
    handler       one event in, one decision out; no I/O
    fleet         the owner of each partition, from the statuses of the workers

The policy and its buckets are in `relaygr.admission`. Only `app` and `faust_stream` import faust.
"""
