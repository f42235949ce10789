"""What the metrics of several processes share: children by label, quantiles of recent values, a folder for them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, TypeVar

from prometheus_client.core import SummaryMetricFamily
from prometheus_client.metrics import MetricWrapperBase

from relaygr.runtime.errors import RelayError

_FOLDER_VARIABLES: Final = ("PROMETHEUS_MULTIPROC_DIR", "prometheus_multiproc_dir")

K = TypeVar("K", bound=str)
M = TypeVar("M", bound=MetricWrapperBase)


def require_metrics_folder() -> None:
    """Raises RelayError if the environment asks prometheus_client to keep values in files, and they cannot be written.

    The library itself raises what `open` raises, where the first metric is made, and names no variable.
    """
    variable = next((name for name in _FOLDER_VARIABLES if name in os.environ), None)
    if variable is None:
        return
    folder = Path(os.environ[variable])
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise RelayError(
            f"{variable} is {folder}, which {'cannot be written' if folder.is_dir() else 'is no folder'}: make the "
            "folder, empty, before the first process that uses prometheus_client starts, or unset the variable."
        )


def by_label(values: Iterable[K], metric: M) -> dict[K, M]:
    """The children of a metric with one label. They are looked up once, which costs more than to count; a known value
    that was not counted yet is 0 on the page.
    """
    return {value: metric.labels(str(value)) for value in values}


class QuantilesMetricFamily(SummaryMetricFamily):
    """A summary without count and sum: Prometheus keeps the label `quantile` for metrics of this type."""

    def add_quantiles(self, labels: Sequence[str], values: Mapping[str, float]) -> None:
        """Adds the series of one combination of labels. `values`: by quantile, such as `0.99`."""
        given = dict(zip(self._labelnames, labels, strict=True))
        for quantile, value in values.items():
            self.add_sample(self.name, {**given, "quantile": quantile}, value)
