"""The dashboards show metrics of the registry, and the committed files are those it makes."""

from __future__ import annotations

import re
import subprocess

import pytest
import yaml

from steadytrain.components.observe.dashboards import DASHBOARDS, RUN, as_json, files
from steadytrain.components.observe.metrics import METRICS, SERIES

from support.manifests import MANIFESTS
from support.prometheus import needed
from support.promql import names

MONITORING = MANIFESTS / "components" / "monitoring"
QUERIES = [
    pytest.param(query, legend, id=f"{page.uid}-{panel.title}-{legend}")
    for page in DASHBOARDS
    for panel in page.panels
    for query, legend in panel.queries.items()
]


@pytest.mark.parametrize(("query", "legend"), QUERIES)
def test_panel_uses_metrics_and_labels_of_the_registry_alone(query, legend):
    found = names(query)
    assert found.series
    assert found.series <= SERIES.keys()
    known = {label for name in found.series for label in SERIES[name].labels}
    assert found.labels <= known | {"le"}
    shown = {word.strip("{}") for word in legend.split() if word.startswith("{{")}
    assert shown <= found.labels


def test_prometheus_accepts_every_query(tmp_path):
    queries = [query.values[0] for query in QUERIES]
    rules = [
        {
            "record": f"q{number}",
            "expr": query.replace("$__rate_interval", "5m").replace("$run", "r"),
        }
        for number, query in enumerate(queries)
    ]
    file = tmp_path / "rules.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
    command = [needed("promtool"), "check", "rules", file]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_page_shows_every_metric():
    shown = {
        SERIES[name].name
        for page in DASHBOARDS
        for panel in page.panels
        for query in panel.queries
        for name in names(query).series
    }
    # These are parts of alerts, or the same in another form.
    assert METRICS.keys() - shown <= {"last_step_timestamp_seconds", "training_epoch", "tokens"}


@pytest.mark.parametrize("page", DASHBOARDS, ids=lambda page: page.uid)
def test_panels_have_their_own_place(page):
    content = as_json(page)
    assert len({panel["id"] for panel in content["panels"]}) == len(page.panels)
    taken = set()
    for panel in content["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {(place["x"] + column, place["y"]) for column in range(place["w"])}
        assert not cells & taken
        taken |= cells


def test_page_of_a_run_shows_that_run_alone():
    for panel in RUN.panels:
        for query in panel.queries:
            used = [word for word in re.findall(r"\w+", query) if word in SERIES]
            assert query.count('{run="$run"}') == len(used)


def test_committed_files_are_those_that_the_registry_makes():
    made = files()
    for name, text in made.items():
        assert (MONITORING / name).read_text() == text, "run `make monitoring`"
    written = {"kustomization.yaml", "pod-monitor.yaml"}
    assert {path.name for path in MONITORING.iterdir()} == made.keys() | written
