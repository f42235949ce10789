"""The trigger: decides from metadata which users' prefixes are computed before the ranking request.

    app           the process: events in, pre-infer jobs out
    faust_stream  faust as the trigger runs it, and the consumer that feeds its channel
    handler       one event in, one decision out; no I/O
    recent        which prefixes the owners probably hold
    users         the last event and the last job of each user
    tail          reads the newest jobs of newly assigned partitions, to rebuild `users`
    policies      the policies that decide, by name
    fleet         the owner of each partition, from the statuses of the workers
    traces        the spans of events and jobs
    metrics       what is counted

The policy and its buckets are in `relaygr.admission`. Only `app` and `faust_stream` import faust.
"""
