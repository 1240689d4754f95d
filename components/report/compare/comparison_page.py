"""A comparison as one HTML page."""

from __future__ import annotations

from steadytrain.components.pages.html import html
from steadytrain.components.report.compare.comparison import Comparison
from steadytrain.components.report.figures import compared_figures


def render(comparison: Comparison) -> str:
    """Return the page as HTML."""
    return html(
        "comparison",
        kind="compare",
        name=" and ".join(comparison.runs),
        runs=comparison.runs,
        verdict=comparison.verdict,
        differences=comparison.differences,
        unrecorded=comparison.unrecorded,
        results=comparison.results,
        figures=compared_figures(comparison.facts),
        tests=comparison.tests(),
        unreadable=comparison.damaged,
    )
