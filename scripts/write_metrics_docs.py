"""Writes docs/metrics.md from the table of metrics; a test fails when the file is behind. Run with `make docs`."""

from __future__ import annotations

from pathlib import Path

from octavo.server.metrics_table import METRICS, Metric

DOCS = Path(__file__).parent.parent / "docs" / "metrics.md"
_ENDINGS = {"counter": "_total", "gauge": "", "histogram": ""}

HEAD = """\
# Metrics

<!-- Made by `make docs` from octavo/server/metrics_table.py; edit that, not this file. -->

`octavo serve` answers Prometheus at `/metrics` (text, or OpenMetrics where it is asked for). Where there are API keys,
it wants one:

```yaml
scrape_configs:
  - job_name: octavo
    authorization: { credentials: YOUR_KEY }   # only if the server has keys
    static_configs: [{ targets: ["127.0.0.1:8000"] }]
```

[grafana.json](grafana.json) is a board for these names: import it and choose the data source.

`--metrics-prefix NAME` changes the first word. With `--metrics-prefix vllm`, the metrics of the last column are
exported under vLLM's names with vLLM's labels (`model_name`, `engine`), so that dashboards made for vLLM work: those
whose meaning is the same; where vLLM has no such label the values are added up. The others keep `octavo_`.

Counts are of answers: a request with `n=3` has three. Times are seconds on the server, from arrival in the engine;
what the network adds, [`octavo bench serve`](cli.md) measures. Labels are fixed sets, so the number of series never
grows. Gauges are 0 when nothing runs.

| metric | kind | label | meaning | with the prefix `vllm` |
| --- | --- | --- | --- | --- |
| `octavo_info` | gauge | `version`, `model`, `block_size_tokens`, `num_blocks` | What is served; always 1 | |
"""


def metrics_docs() -> str:
    """Return the text of docs/metrics.md."""
    return HEAD + "".join(map(_row, METRICS))


def _row(metric: Metric) -> str:
    ending = _ENDINGS[metric.kind]
    label = f"`{metric.label}`" if metric.label else ""
    vllm = f"`vllm:{metric.vllm}{ending}`" if metric.vllm else ""
    return f"| `octavo_{metric.name}{ending}` | {metric.kind} | {label} | {metric.help} | {vllm} |\n"


if __name__ == "__main__":
    DOCS.write_text(metrics_docs(), encoding="utf-8")
