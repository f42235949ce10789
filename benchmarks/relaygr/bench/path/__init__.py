"""The path of one ranking request through a worker: `python -m benchmarks.path`."""
