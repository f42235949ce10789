"""What a hot standby is worth: a worker is killed under traffic, and every request's delay is measured.

traffic    users who come again and again
pair       a supervisor's children
__main__   `python -m benchmarks.standby`
"""
