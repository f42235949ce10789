"""Holds `relaygr size` against a run of the relay: `python -m benchmarks.sizing`."""
