"""The cost of the engine on this device: `python -m benchmarks.engine`."""
