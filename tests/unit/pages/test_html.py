"""Templates: each is used, and text in them is only text."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pyarrow as pa
import pytest
from markupsafe import Markup

from steadytrain import components, pipelines
from steadytrain.components.evaluate.step import evaluation_page
from steadytrain.components.pages.charts import (
    Curve,
    Series,
    intervals,
    line_chart,
    parallel,
    scatter,
    share_chart,
)
from steadytrain.components.pages.html import html
from steadytrain.components.shared.records import EvaluationRecord, Interval

HOSTILE = "</pre></script><script>alert('x')</script><img src=x onerror=\"y()\">&amp;{{ 7*7 }}"
SECRET = "hf_" + "c4n4ry" * 6


def test_every_template_is_used_and_every_page_has_one() -> None:
    folder = Path(components.__path__[0]) / "pages" / "templates"
    found = {str(path.relative_to(folder)).removesuffix(".html.j2"): path.read_text()
             for path in folder.rglob("*.j2")}  # fmt: skip
    code = [
        path.read_text() for place in (components, pipelines)
        for path in Path(place.__path__[0]).rglob("*.py")
    ]  # fmt: skip
    shown = re.findall(r'(?:html|study_html)\(\s*"([\w/]+)"', "\n".join(code))
    inner = re.findall(r'(?:extends|include) "([\w/]+)\.html\.j2"', "\n".join(found.values()))
    assert {*shown, *inner, "parts"} == set(found)


def is_only_text(page: str) -> bool:
    return not any(word in page for word in ("<script>", "<img", "<b>", SECRET, "\x1b"))


def test_text_of_a_page_is_only_text() -> None:
    record = EvaluationRecord(
        task=HOSTILE,
        weights_digest="0",
        examples=3,
        metrics={HOSTILE: Interval(value=2, low=1, high=3)},
        labels=[HOSTILE, "b"],
        confusion=[[1, 2], [3, 4]],
        per_class={HOSTILE: {HOSTILE: 0.5, "average_precision": 0.5}},
        curves={HOSTILE: [(0.0, 1.0), (1.0, 0.5)]},
        slices={HOSTILE: {HOSTILE: 0.5}},
        landscape_missing=f"{HOSTILE} \x1b[31m{SECRET}",
        scores="",
    )
    columns = {"id": [HOSTILE], "loss": [1.0], "targets": [1], "slice": [HOSTILE]}
    scores = pa.table({**columns, "label": [0], "prediction": [0]})
    # The secret is longer than what is left of the excerpt.
    texts = pa.table({"text": [f"{HOSTILE} {'.' * 130} {SECRET}"]})
    page = evaluation_page(record, scores, texts, title=HOSTILE)
    assert is_only_text(page)
    assert SECRET[:12] not in page
    assert page.count("&lt;script&gt;") > 10
    page = html("ui/message", uri=HOSTILE, title=SECRET, message=HOSTILE, remedy="\x1b[1m<b>")
    assert is_only_text(page)


@pytest.mark.parametrize(
    "chart",
    [
        line_chart(HOSTILE, [Curve(HOSTILE, [(1, 1.0)], [2])], marks=[(1, HOSTILE)]),
        share_chart(HOSTILE, HOSTILE, [[(0, 1), (1, 0)]], HOSTILE),
        scatter(HOSTILE, [Series("a", dots=[((0, 1), HOSTILE)])], HOSTILE, names=[HOSTILE]),
        intervals(HOSTILE, [(HOSTILE, 0.0, 1.0, 2.0, "best")]),
        parallel(HOSTILE, [(HOSTILE, HOSTILE, "1")] * 2, [Series("a", [(0, 0), (1, 1)], HOSTILE)]),
    ],
)
def test_text_of_a_chart_is_only_text(chart: Markup) -> None:
    drawing = ElementTree.fromstring(chart)
    assert HOSTILE in drawing.attrib["aria-label"]
    assert {item.tag for item in drawing.iter()} <= {
        *("svg", "text", "title", "line", "circle", "path", "polyline", "rect")
    }
    assert HOSTILE in [item.text for item in drawing.iter()]
