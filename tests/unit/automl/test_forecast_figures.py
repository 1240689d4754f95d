"""The figure of forecasts: a line for each fold, all values in sight, and dates on the axis."""

from __future__ import annotations

import math
from xml.etree import ElementTree

import numpy as np
import pyarrow as pa
import pytest

from steadytrain.components.automl.forecasts import forecast_figures
from steadytrain.components.automl.unit_scores import unit_scores
from steadytrain.components.pages.charts import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDE
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.tune.history import Trial

MONTHS = [f"{1998 + n // 12}-{n % 12 + 1:02d}-01" for n in range(24)]


def scores(times, *, folds=2, name="", absent=(), off=0.0, texts=MONTHS):
    """Return scores of times that follow each other, the same number in each fold."""
    kept = [n for n in range(times) if n not in absent]
    truth = np.array([10.0 * math.sin(n) for n in kept])
    return pa.table(
        {
            "series": [name] * len(kept),
            "time": [texts[n] for n in kept],
            "ordinal": [1000.0 + n for n in kept],
            "fold": [n * folds // times for n in kept],
            "target": truth,
            "predicted": truth + off,
            "low": truth + off - 3,
            "high": truth + off + 2,
        }
    ).take(np.random.default_rng(0).permutation(len(kept)))


def drawn(figure):
    """Return the points of lines, by class, and the dots and texts of a figure."""
    root = ElementTree.fromstring(str(figure.svg))
    lines = {}
    for item in root.iter("polyline"):
        points = [tuple(map(float, pair.split(","))) for pair in item.get("points").split()]
        lines.setdefault(item.get("class"), []).append(points)
    dots = [(float(it.get("cx")), float(it.get("cy")), it) for it in root.iter("circle")]
    texts = [it.text for it in root.iter("text")]
    return lines, dots, texts


def test_each_fold_has_its_own_line_and_all_values_are_in_sight():
    # All forecasts are above all values.
    (figure,) = forecast_figures(scores(24, off=50))
    lines, dots, texts = drawn(figure)
    assert [len(points) for points in lines["line c0"]] == [12, 12]
    assert [len(points) for points in lines["band c0"]] == [24, 24]
    assert [len(points) for points in lines["line c1"]] == [24]
    assert lines["line c0"][0][-1][0] < lines["line c0"][1][0][0]
    points = [point for several in lines.values() for line in several for point in line]
    for x, y in [*points, *(dot[:2] for dot in dots)]:
        assert LEFT <= x <= WIDE - RIGHT
        assert TOP <= y <= HEIGHT - BOTTOM
    assert len(dots) == 24
    assert texts[-6:] == ["1998-01", "1998-06", "1998-10", "1999-03", "1999-07", "1999-12"]
    assert "1998-01-01: 0, forecast 50 (47 to 52)" in dots[0][2][0].text
    # A value is at one height, whoever has it.
    heights = {round(y) for _, y in lines["line c0"][0]}
    ends = {round(y) for _, y in lines["line c1"][0]}
    assert not heights & ends


def test_lines_are_broken_at_gaps_and_a_time_alone_is_a_dot():
    (figure,) = forecast_figures(scores(24, absent=(3, 4, 6)))
    lines, dots, _ = drawn(figure)
    assert [len(points) for points in lines["line c0"]] == [3, 1, 5, 12]
    assert [len(points) for points in lines["line c1"]] == [3, 1, 17]
    assert [it.get("class") for *_, it in dots].count("line c0") == 1
    (one,) = forecast_figures(scores(3, folds=3))
    lines, dots, texts = drawn(one)
    assert [len(points) for points in lines["band c0"]] == [2, 2, 2]
    assert len(dots) == 6
    assert texts[-3:] == ["1998-01", "1998-02", "1998-03"]


def test_many_series_are_named_and_counted():
    table = pa.concat_tables([scores(6, name=f"shop {n}") for n in range(11)])
    found = list(forecast_figures(table))
    assert [figure.title for figure in found] == [
        f"Forecasts of {name}" for name in ("shop 0", "shop 1", "shop 10", "shop 2")
    ]
    assert all("the first 4 of 11 series" in figure.caption for figure in found)
    (alone,) = forecast_figures(scores(6))
    assert "series" not in alone.caption


@pytest.mark.parametrize(
    ("texts", "shown", "axis"),
    [
        ([f"2024-05-{n + 1:02d}" for n in range(24)], "2024-05-24", "time"),
        ([f"2024-05-01T{n:02d}:00:00Z" for n in range(24)], "2024-05-01 23:00", "time (UTC)"),
        ([str(1990 + n) for n in range(24)], "2013", "time"),
    ],
)
def test_the_axis_has_dates(texts, shown, axis):
    (figure,) = forecast_figures(scores(24, texts=texts))
    _, _, said = drawn(figure)
    assert said[-1] == shown
    assert said[0] == axis


def test_scores_without_the_names_of_series_are_refused(tmp_path):
    import json

    import pyarrow.parquet as pq

    from steadytrain.components.shared.artifact import Artifact
    from steadytrain.components.tune.trials.folder import ARTIFACT, LABELS, PEAK, TrialFolder

    artifact = Artifact(latency_p50_ms=1.0, latency_p99_ms=1.0, memory_mb=1.0, size_mb=1.0)
    kept = {
        LABELS: json.dumps([]).encode(),
        ARTIFACT: artifact.model_dump_json().encode(),
        PEAK: b"1",
    }
    path = TrialFolder(tmp_path, 0).scores
    path.parent.mkdir(parents=True)
    pq.write_table(pa.table({"scaled_error": [1.0]}).replace_schema_metadata(kept), path)
    with pytest.raises(BadInput, match=r"scores of a unit lack 'series'"):
        unit_scores(tmp_path, Trial(0, {}, 0))
