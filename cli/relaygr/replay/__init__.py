"""Replays recorded look-ups against a cache with other policies and sizes.

    demand         who asked for which prefix, and when: read from a trace
    synthetic      makes traces without a worker, from a log of interactions or from a schedule
    run            plays a demand against a real `PrefixCache` on a virtual clock
    link           the simulated link between the two tiers
    parallel       plays several candidates side by side
    bound          an upper bound on the hits of any policy
    tables, plots  print and draw the results

A replay moves no bytes and computes nothing. Computing takes no time in it and copies take the link's time. So a
replay compares policies and sizes; it says nothing about queueing.
"""
