"""Reads what the demo's processes say of themselves on `/metrics`."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families


@dataclass(frozen=True, slots=True)
class Reading:
    """One process's samples: name -> labels -> value. Empty if it did not answer."""

    samples: Mapping[str, Mapping[tuple[tuple[str, str], ...], float]] = field(default_factory=dict)

    def total(self, name: str, **labels: str) -> float:
        """The sum over all samples of that name that carry these labels."""
        wanted = set(labels.items())
        return sum(value for found, value in self.samples.get(name, {}).items() if wanted <= set(found))

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """Totals of a name by one label's value."""
        totals: dict[str, float] = {}
        for found, value in self.samples.get(name, {}).items():
            key = dict(found).get(label, "")
            totals[key] = totals.get(key, 0.0) + value
        return totals


def read_metrics(port: int) -> Reading:
    """What the process that serves its probes there counts now."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=1) as answer:
            text = answer.read().decode()
    except (urllib.error.URLError, OSError):
        return Reading()
    samples: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return Reading(samples)
