"""Every metric of the Prometheus endpoint, from the registry."""

from __future__ import annotations

from reference.markdown import code, table

from steadytrain.components.observe.metrics import COMMON_LABELS, METRICS, Metric

_HEADS = ("Metric", "In queries", "Kind", "Unit", "Label", "Meaning")


def page() -> str:
    """One table."""
    common = " and ".join(code(label) for label in COMMON_LABELS)
    intro = (
        "# Metrics\n\n"
        "What Prometheus gets from a run (`observability.prometheus_port`). Every series has the "
        f"labels {common}. Prometheus adds `_total` to the names of counters, and `_bucket`, "
        "`_sum` and `_count` to those of histograms. A metric whose value is unknown is missing. "
        "[Monitoring](../guides/monitoring.md) explains how to use them.\n"
    )
    return "\n".join([intro, table(_HEADS, map(_row, METRICS.values()))])


def _row(metric: Metric) -> tuple[str, ...]:
    meaning = metric.help
    if metric.buckets:
        meaning += f" Buckets: {', '.join(f'{bound:,}' for bound in metric.buckets)}."
    label = code(metric.label)
    if metric.values:
        label += f": {', '.join(metric.values)}"
    names = ", ".join(code(name) for name in metric.series)
    return code(metric.name), names, metric.kind, metric.unit, label, meaning
