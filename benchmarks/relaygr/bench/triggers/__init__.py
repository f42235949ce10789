"""Several trigger processes: the events that they read, and whether what they admit adds up to one budget.

run        the processes, the events and the figures
__main__   `python -m benchmarks.triggers`
"""
