"""Every alert rule, and every problem that the log names, from the registry."""

from __future__ import annotations

from reference.markdown import code, table

from steadytrain.components.observe.alerts import ALERTS
from steadytrain.components.shared.log import CONCLUSIONS


def page() -> str:
    """Two tables."""
    intro = (
        "# Alerts\n\n"
        "`manifests/components/monitoring` has these rules for Prometheus. "
        "[Monitoring](../guides/monitoring.md) explains how to use them.\n"
    )
    rules = (
        (
            code(alert.name),
            alert.severity,
            alert.meaning.replace(" {{ $labels.run }}", ""),
            code(alert.expression),
            alert.pending,
            alert.remedy,
        )
        for alert in ALERTS
    )
    log = (
        "\n## In the log\n\n"
        "The log names these problems, in addition to every [event](events.md).\n"
    )
    lines = ((code(item.name), item.level, item.meaning, item.remedy) for item in CONCLUSIONS)
    heads = ("Alert", "Severity", "Meaning", "Expression", "For", "Fix")
    return "\n".join(
        [intro, table(heads, rules), log, table(("Name", "Level", "Meaning", "Fix"), lines)]
    )
