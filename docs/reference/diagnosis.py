"""Every rule of the diagnosis, from its registry."""

from __future__ import annotations

from reference.markdown import code, table

from steadytrain.components.observe.diagnosis import RULES


def page() -> str:
    """One table."""
    intro = (
        "# Diagnosis\n\n"
        "Rules look for these problems in the events of a run. "
        "[Monitoring](../guides/monitoring.md#diagnosis) explains where they are shown.\n"
    )
    rows = (
        (
            code(rule.name),
            rule.meaning,
            (rule.check.__doc__ or "").strip(),
            rule.remedy,
            rule.source,
        )
        for rule in RULES.values()
    )
    return "\n".join([intro, table(("Rule", "Meaning", "When", "Fix", "Source"), rows)])
