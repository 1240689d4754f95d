"""Metrics from other packages are found through their entry points."""

from __future__ import annotations

import re
import sys

import numpy as np
import pytest

from steadytrain.components.evaluate.bootstrap import Resampling
from steadytrain.components.evaluate.metric import Scores, measure, metrics, point_values
from steadytrain.components.shared import plugins
from steadytrain.components.shared.config import GateConfig
from steadytrain.components.shared.errors import BadInput, SteadytrainError

from support.evaluating import language_table
from support.plugins import install_example


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    return install_example(tmp_path_factory.mktemp("example"))


@pytest.fixture
def add(monkeypatch, tmp_path):
    """Install a distribution with one metric whose module contains the given text."""
    metrics.cache_clear()

    def added(name, text, *, package="other"):
        folder = tmp_path / package
        info = folder / f"{package}-2.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Name: {package}\nVersion: 2.0\n")
        (info / "entry_points.txt").write_text(f"[{plugins.METRICS}]\n{name} = {package}_m:M\n")
        (folder / f"{package}_m.py").write_text(text)
        monkeypatch.syspath_prepend(folder)

    yield added
    metrics.cache_clear()


@pytest.fixture
def scores():
    return Scores.of(language_table([10.0, 2.0, 3.0], [5, 1, 2], [20, 4, 8]))


@pytest.mark.slow
def test_installed_package_adds_its_metrics(example, monkeypatch, scores):
    monkeypatch.syspath_prepend(example)
    metrics.cache_clear()
    try:
        found = measure(scores, Resampling(100, 0.9, 0))
        assert GateConfig(metric="median_loss", floors={"bits_per_token": 3}).metric
        assert plugins.added(plugins.METRICS) == [
            "bits_per_token = steadytrain_example.metrics:BITS_PER_TOKEN of steadytrain-example "
            "1.0",
            "median_loss = steadytrain_example.metrics:MEDIAN_LOSS of steadytrain-example 1.0",
            "progression_rmse = steadytrain_example.metrics:RMSE of steadytrain-example 1.0",
        ]
    finally:
        metrics.cache_clear()
        for name in [name for name in sys.modules if name.startswith("steadytrain_example")]:
            del sys.modules[name]
    assert found["median_loss"].value == 3.0
    assert found["median_loss"].low == 2.0
    assert found["median_loss"].high == 10.0
    assert found["bits_per_token"].value == pytest.approx(15 / 8 / np.log(2))


def test_built_in_metrics_are_not_listed_as_additions():
    assert plugins.added(plugins.METRICS) == []
    assert "accuracy" in plugins.names(plugins.METRICS)


def test_metric_that_cannot_be_imported_names_its_package(add, scores):
    add("broken", "import nothing_of_that_name")
    with pytest.raises(BadInput, match=r"'broken' .* other 2\.0: .*No module named"):
        point_values(scores)


def test_two_packages_with_one_name_are_named(add, scores):
    add("loss", "M = None")
    with pytest.raises(BadInput, match=re.escape("several packages: other 2.0, steadytrain ")):
        point_values(scores)


def test_metric_that_raises_is_named(add, scores):
    add(
        "odd",
        "from steadytrain.components.evaluate.metric import SampleMetric\n"
        "M = SampleMetric(True, lambda scores: 1 / 0)\n",
    )
    with pytest.raises(SteadytrainError, match="the metric 'odd' cannot be computed"):
        point_values(scores)
