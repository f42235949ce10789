"""Compares `relaygr size` with a run of the relay: `python -m benchmarks.sizing`."""
