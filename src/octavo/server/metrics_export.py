"""MetricsExport: a fold's counts in the form that Prometheus scrapes, with a registry of its own.

With the prefix `vllm`, what vLLM exports too is exported under its names, labels included, so that dashboards made for
it work; what only Octavo has keeps its own name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from octavo.errors import InvalidParameterError
from octavo.server.histogram import Histogram
from octavo.server.metrics_fold import MetricsFold
from octavo.server.metrics_table import METRICS, Metric, PoolUse
from octavo.version import __version__

OWN_PREFIX = "octavo"
VLLM_PREFIX = "vllm"


class MetricsExport(Collector):
    """Turns counts into metric families whenever it is scraped.

    Args:
        fold: Counts to export.
        pool_use: Returns what the pool holds now; must answer at once, also when the engine does not.
        model: Name of the model, the label of the info metric.
        prefix: First word of every name; `vllm` as described above.

    Raises:
        InvalidParameterError: the prefix cannot begin a metric name.
    """

    def __init__(
        self, fold: MetricsFold, pool_use: Callable[[], PoolUse], *, model: str, prefix: str = OWN_PREFIX
    ) -> None:
        if not re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", prefix):
            raise InvalidParameterError(
                f"{prefix!r} cannot begin the name of a metric",
                param="--metrics-prefix",
                because="a name is letters, digits and underscores, and begins with no digit",
                hints=(f"`--metrics-prefix {OWN_PREFIX}` is the default, `{VLLM_PREFIX}` takes vLLM's names",),
            )
        self._fold = fold
        self._pool_use = pool_use
        self._model = model
        self._prefix = prefix
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def render(self, accept: str) -> tuple[bytes, str]:
        """Return the exposition that an `Accept` header asks for, and its content type."""
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type

    def collect(self) -> Iterator[Family]:
        pool = self._pool_use()
        yield self._info(pool)
        for metric in METRICS:
            values = metric.read(self._fold, pool)
            if self._prefix == VLLM_PREFIX and metric.vllm:
                labels = {"model_name": self._model, "engine": "0"}
                yield _family(metric, f"vllm:{metric.vllm}", metric.vllm_label, values, labels)
            else:
                prefix = OWN_PREFIX if self._prefix == VLLM_PREFIX else self._prefix
                yield _family(metric, f"{prefix}_{metric.name}", metric.label, values, {})

    def _info(self, pool: PoolUse) -> Family:
        prefix = OWN_PREFIX if self._prefix == VLLM_PREFIX else self._prefix
        facts = {
            "version": __version__,
            "model": self._model,
            "block_size_tokens": str(pool.block_size),
            "num_blocks": str(pool.num_usable_blocks),
        }
        family = GaugeMetricFamily(f"{prefix}_info", "What is served; always 1", labels=list(facts))
        family.add_metric(list(facts.values()), 1)
        return family


def _family(metric: Metric, name: str, label: str, values: Any, fixed: Mapping[str, str]) -> Family:
    """Return a family of one metric; a label that is not wanted is added up."""
    names = [*fixed, *([label] if label else [])]
    if isinstance(values, Histogram):
        histogram = HistogramMetricFamily(name, metric.help, labels=names)
        histogram.add_metric(list(fixed.values()), buckets=values.buckets(), sum_value=values.sum)
        return histogram
    kind = GaugeMetricFamily if metric.kind == "gauge" else CounterMetricFamily
    family = kind(name, metric.help, labels=names)
    if label:
        for value, number in values.items():
            family.add_metric([*fixed.values(), value], number)
    else:
        number = sum(values.values()) if isinstance(values, Mapping) else values
        family.add_metric(list(fixed.values()), number)
    return family
