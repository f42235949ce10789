"""The two headline figures: the longest history, and the most requests, that meet the deadline at P99.

    grid (cells)  ->  plan (a cell on this machine)  ->  trace  ->  run (one system, one trace)  ->  row of runs.csv
                                                                                                        |
    report (tables, plots)  <-  decision (seeds, bounds, ratios)  <-  search (which run comes next)  <--+

Every figure is a function of `runs.csv`, `paths.csv` and the plans, so a report can be made again, and a search that
was interrupted goes on where it stopped: a run that is in the file is not repeated.
"""
