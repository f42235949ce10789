"""What the engine costs on this device: `python -m benchmarks.engine`."""
