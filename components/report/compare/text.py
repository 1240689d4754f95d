"""A comparison as text, for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from steadytrain.components.pages.charts import thin
from steadytrain.components.pages.html import html
from steadytrain.components.pages.text_table import aligned
from steadytrain.components.report.compare.comparison import Comparison
from steadytrain.components.report.compare.side_by_side import Row
from steadytrain.components.report.figures import compared_figures
from steadytrain.components.shared.controls import on_one_line
from steadytrain.components.shared.quantities import number

STEPS: Final = 12
"""Steps of a curve that are shown at most. The page and `--json` have more."""
WIDEST: Final = 60
"""Longest name or value. Longer ones are cut."""


def lines(comparison: Comparison) -> Iterator[str]:
    """Yield the verdict, what differs, what each run has reached, and its curves."""
    runs = comparison.runs
    yield comparison.verdict.sentence
    for problem in comparison.damaged:
        yield f"damaged: {problem}"
    same = []
    for section, rows in comparison.differences.items():
        if section in comparison.unrecorded:
            yield from ("", f"{section}: not recorded by every run")
        elif not rows:
            same.append(section)
            continue
        if rows:
            yield from ("", *_table(f"different {section}", runs, rows))
    if same:
        yield from ("", f"the same: {', '.join(same)}")
    yield from ("", *_table("results", runs, comparison.results))
    for name, steps, values in comparison.steps():
        shown = [index for index, _ in thin([(i, 0.0) for i in range(len(steps))], STEPS)]
        rows = [
            (number(steps[int(i)]), [number(column[int(i)]) for column in values]) for i in shown
        ]
        yield from ("", *_table(f"{name} by step", runs, rows))
    if tests := comparison.tests():
        level = f"{100 * comparison.verdict.confidence:g} % interval"
        columns = [*runs, "difference", level, "better"]
        yield from ("", *_table("test side", columns, tests))


def _table(title: str, columns: Sequence[str], rows: Sequence[Row]) -> Iterator[str]:
    """Return a heading and rows in aligned columns."""
    cells = [[title, *columns], *([f"  {name}", *values] for name, values in rows)]
    return aligned([[_short(cell) for cell in row] for row in cells])


def _short(text: str) -> str:
    clean = on_one_line(text)
    return clean if len(clean) <= WIDEST else f"{clean[: WIDEST - 1]}…"


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
