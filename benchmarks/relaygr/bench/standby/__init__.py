"""The cost of a kill with a hot standby: a worker is killed under load, and the delay of every request is measured.

traffic    the load: users who send one request after another
pair       the process ids of a supervisor's children
run        one kill after another, and the figures of each
__main__   `python -m benchmarks.standby`
"""
