"""A comparison as one HTML page, in the style of the report."""

from __future__ import annotations

from steadytrain.components.report.compare.comparison import Comparison
from steadytrain.components.report.compare.side_by_side import compared_figures
from steadytrain.components.report.page import rendered


def render(comparison: Comparison) -> str:
    """Return the page as HTML."""
    return rendered(
        "compare.html.j2",
        package=__package__,
        runs=comparison.runs,
        verdict=comparison.verdict,
        differences=comparison.differences,
        unrecorded=comparison.unrecorded,
        results=comparison.results,
        figures=compared_figures(comparison.facts),
        tests=comparison.tests(),
        unreadable=comparison.damaged,
    )
