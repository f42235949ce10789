"""Makes `python -m benchmarks.NAME` run `relaygr.bench.NAME` in a checkout, or NAME beside this file. Not installed."""

from pathlib import Path

__path__.insert(0, str(Path(__file__).parent / "relaygr" / "bench"))
