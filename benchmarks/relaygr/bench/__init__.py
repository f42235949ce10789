"""Benchmarks: `python -m benchmarks.NAME` in a checkout, `relaygr bench NAME` where it is installed."""
