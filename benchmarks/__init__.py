"""Makes `python -m benchmarks.NAME` run `relaygr.bench.NAME` in a checkout. Not installed."""

from pathlib import Path

__path__ = [str(Path(__file__).parent / "relaygr" / "bench")]
