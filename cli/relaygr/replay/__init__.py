"""Replays recorded look-ups against a cache with other policies and sizes.

    demand         the requests for prefixes (user, prefix, time), read from a trace into columns
    synthetic      makes traces without a worker, from a log of interactions or from a schedule
    run            plays demands against the worker's policies on a virtual clock
    tiers          what one tier holds, in numbers of pages
    histories      which cached prefix covers how much of another
    link           the simulated link between the two tiers
    parallel       plays several candidates in parallel
    recording      files of what a trigger sees: events, ranking requests and statuses
    trigger        plays a recording under a policy of the trigger
    risk           plays the requests of a run without the relay under rules of the risk
    bound          an upper bound on the hits of any policy
    tables, plots  print and draw the results

A replay moves no bytes and computes nothing. In a replay, a computation takes no time and a copy takes the time of the
link. So a replay compares policies and sizes; it does not simulate queueing.
"""
