"""Every alert fires when it should and only then, as promtool evaluates it."""

from __future__ import annotations

import re
import subprocess

import pytest
import yaml

from steadytrain.components.observe.alerts import ALERTS, AlertState
from steadytrain.components.observe.dashboards import groups
from steadytrain.components.observe.metrics import COMMON_LABELS, SERIES, Samples, Series
from steadytrain.components.shared.config.fields import leaves
from steadytrain.components.shared.config.run import RunConfig

from support.prometheus import needed
from support.promql import names

LABELS = '{run="r", model="m"}'
TRAINING = {"run_active": "1x600", "attempt_ready": "1x600"}
STARTED = {"attempt_started_timestamp_seconds": "0x600"}

# By alert: whether it fires, after how many minutes, and one value a minute for each series.
CASES = {
    "SteadytrainNoProgress": [
        (True, 40, {**TRAINING, **STARTED, "last_step_timestamp_seconds": "60x600"}),
        (True, 40, {**TRAINING, **STARTED}),
        (False, 40, {**TRAINING, **STARTED, "last_step_timestamp_seconds": "0+60x600"}),
        (False, 20, {**TRAINING, **STARTED, "last_step_timestamp_seconds": "60x600"}),
        # A new attempt has just started.
        (
            False,
            40,
            {
                **TRAINING,
                "attempt_started_timestamp_seconds": "1800x600",
                "last_step_timestamp_seconds": "60x600",
            },
        ),
        (False, 40, {"run_active": "0x600", "attempt_ready": "1x600", **STARTED}),
    ],
    "SteadytrainLowGoodput": [
        (True, 60, {**TRAINING, "goodput": "0.3x600", 'run_seconds{phase="lost"}': "4000x600"}),
        (False, 60, {**TRAINING, "goodput": "0.7x600", 'run_seconds{phase="lost"}': "4000x600"}),
        (False, 60, {**TRAINING, "goodput": "0.3x600", 'run_seconds{phase="lost"}': "300x600"}),
        (
            True,
            60,
            {
                **TRAINING,
                "goodput": "0.3x600",
                'run_seconds{phase="lost"}': "2000x600",
                'run_seconds{phase="useful"}': "2000x600",
            },
        ),
    ],
    "SteadytrainGpuUtilLow": [
        (True, 30, {**TRAINING, "gpu_utilization": "0.2x600"}),
        (False, 30, {**TRAINING, "gpu_utilization": "0.9x600"}),
        (False, 30, {"run_active": "0x600", "gpu_utilization": "0.2x600"}),
        (False, 30, TRAINING),
    ],
    "SteadytrainLossDiverging": [
        (True, 20, {"training_loss": " ".join(["NaN"] * 30)}),
        (True, 20, {"training_loss": "1x600", "divergences_total": "0x5 1x600"}),
        (True, 70, {"training_loss": "1x40 2x600"}),
        (False, 70, {"training_loss": "3-0.01x600", "divergences_total": "1x600"}),
    ],
    "SteadytrainOverBudget": [
        (True, 5, {"cost_usd_total": "11x600", "cost_budget_usd": "10x600"}),
        (False, 5, {"cost_usd_total": "9x600", "cost_budget_usd": "10x600"}),
        (False, 5, {"cost_usd_total": "9x600"}),
    ],
    "SteadytrainCheckpointTooOld": [
        (True, 200, {**TRAINING, **STARTED, "last_checkpoint_timestamp_seconds": "600x600"}),
        (True, 200, {**TRAINING, **STARTED}),
        (False, 200, {**TRAINING, **STARTED, "last_checkpoint_timestamp_seconds": "0+60x600"}),
    ],
    "SteadytrainQueuedTooLong": [
        (True, 40, {"run_active": "1x600", "attempt_ready": "0x600", **STARTED}),
        (False, 40, {**TRAINING, **STARTED}),
        (False, 20, {"run_active": "1x600", "attempt_ready": "0x600", **STARTED}),
    ],
    "SteadytrainSinkLagging": [
        (True, 10, {"sink_lag_seconds": "700x600"}),
        (False, 10, {"sink_lag_seconds": "3x600"}),
        (False, 4, {"sink_lag_seconds": "700x600"}),
    ],
}


def series(name):
    metric, _, label = name.rstrip("}").partition("{")
    return f"{metric}{{{', '.join([*([label] if label else []), LABELS.strip('{}')])}}}"


def case(alert, fires, minutes, values):
    """Return promtool's test of one case."""
    rule = next(item for item in groups()["groups"][0]["rules"] if item["alert"] == alert)
    said = {
        name: text.replace("{{ $labels.run }}", "r") for name, text in rule["annotations"].items()
    }
    expected = {"exp_labels": {"run": "r", "model": "m", **rule["labels"]}, "exp_annotations": said}
    test = {"eval_time": f"{minutes}m", "alertname": alert}
    return {
        "interval": "1m",
        "name": f"{alert} {fires} {values}",
        "input_series": [
            {"series": series(name), "values": value} for name, value in values.items()
        ],
        "alert_rule_test": [{**test, "exp_alerts": [expected] if fires else []}],
    }


@pytest.fixture(scope="module")
def promtool():
    return needed("promtool")


@pytest.fixture
def rules(tmp_path):
    path = tmp_path / "rules.yaml"
    path.write_text(yaml.safe_dump(groups()))
    return path


def run_tests(promtool, rules, cases):
    content = {"rule_files": [rules.name], "evaluation_interval": "1m", "tests": cases}
    tests = rules.with_name("tests.yaml")
    tests.write_text(yaml.safe_dump(content))
    command = [promtool, "test", "rules", tests.name]
    return subprocess.run(command, cwd=rules.parent, capture_output=True, text=True)


@pytest.mark.slow
def test_every_alert_fires_when_it_should_and_only_then(promtool, rules):
    assert CASES.keys() == {alert.name for alert in ALERTS}
    for name, found in CASES.items():
        assert {fires for fires, *_ in found} == {True, False}, name
    cases = [case(name, *values) for name, found in CASES.items() for values in found]
    done = run_tests(promtool, rules, cases)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_alert_without_prometheus_fires_as_with_it(alert):
    for fires, minutes, values in CASES[alert.name]:
        state, series = AlertState(set()), Series()
        expanded = {key(name): expand(text) for name, text in values.items()}
        for minute in range(minutes + 1):
            samples = Samples()
            samples.values |= {
                name: found[minute] for name, found in expanded.items() if minute < len(found)
            }
            series.add(60.0 * minute, samples)
            state.update(series)
        assert (alert.name in state.firing) == fires, (minutes, values)


def key(name):
    """Return the key of a series in `Samples`."""
    metric, _, label = name.removesuffix('"}').partition("{")
    return SERIES[metric].name, label.partition('"')[2]


def expand(text):
    """Return the values of promtool's notation: 1x2 is 1 1 1, and 0+60x2 is 0 60 120."""
    values = []
    for part in text.split():
        start, by, times = re.fullmatch(r"([\d.]+|NaN)(?:([+-][\d.]+))?(?:x(\d+))?", part).groups()
        count = int(times or 0) + 1
        values += [float(start) + place * float(by or 0) for place in range(count)]
    return values


def test_wrong_expectation_fails(promtool, rules):
    """Make sure that the tests of the alerts can fail."""
    fires, minutes, values = CASES["SteadytrainOverBudget"][0]
    wrong = case("SteadytrainOverBudget", not fires, minutes, values)
    assert run_tests(promtool, rules, [wrong]).returncode != 0


def test_promtool_accepts_the_rules(promtool, rules):
    done = subprocess.run([promtool, "check", "rules", rules], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_alert_uses_metrics_of_the_registry_alone(alert):
    found = names(alert.expression)
    assert found.series
    assert found.series <= SERIES.keys()
    known = {label for name in found.series for label in SERIES[name].labels}
    assert found.labels <= known | set(COMMON_LABELS)


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_alert_says_what_it_means_and_what_to_do_in_terms_that_exist(alert):
    assert "{{ $labels.run }}" in alert.meaning
    fields = {field.name for field in leaves(RunConfig)}
    sections = {name.partition(".")[0] for name in fields}
    for word in re.findall(r"[a-z]+\.[a-z_]+", alert.meaning + alert.remedy):
        assert word in fields or word.partition(".")[0] not in sections, word
    for word in re.findall(r"\w+_total|\w+_seconds\b", alert.remedy):
        assert word in SERIES or f"{word}_total" in SERIES or f".{word}" in alert.remedy, word


def test_names_are_found_where_they_are():
    found = names(
        'sum by (phase) (rate(a_total{run="x y", class=~"b"}[5m])) / c > 2 and time() - d offset 3h'
    )
    assert found.series == {"a_total", "c", "d"}
    assert found.labels == {"phase", "run", "class"}
