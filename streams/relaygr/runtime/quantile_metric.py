"""Quantiles of recent values as a Prometheus metric."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from prometheus_client.core import SummaryMetricFamily


class QuantilesMetricFamily(SummaryMetricFamily):
    """A summary without count and sum: Prometheus keeps the label `quantile` for metrics of this type."""

    def add_quantiles(self, labels: Sequence[str], values: Mapping[str, float]) -> None:
        """Adds the series of one combination of labels. `values`: by quantile, such as `0.99`."""
        given = dict(zip(self._labelnames, labels, strict=True))
        for quantile, value in values.items():
            self.add_sample(self.name, {**given, "quantile": quantile}, value)
