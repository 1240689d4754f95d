"""Plans of time series: memory, steps and measured time of each framework."""

from __future__ import annotations

import json
from dataclasses import replace

import jsonschema
import pytest
from typer.testing import CliRunner

from steadytrain.components.plan.design import schema
from steadytrain.components.series.training import Forecasting
from steadytrain.pipelines.cli import app

from support.designed import follows_the_schema
from support.planning import plan_of
from support.series import FIRMS, firms, prepared, series_config

pytestmark = pytest.mark.slow
NETWORK = ["model.framework=pytorch", "model.config={model_type: mlp, width: 16, blocks: 1}"]
MODELS = {
    "boosted": ["model.framework=mlforecast", "model.config={model_type: lightgbm, lags: [1, 2]}"],
    "statistical": ["model.config={model_type: auto_ets}"],
    "network": NETWORK,
    "ensemble": [
        "model.framework=ensemble",
        "model.config={model_type: ensemble, members: [{framework: statsforecast, "
        "config: {model_type: auto_theta}}, {framework: mlforecast, "
        "config: {model_type: lightgbm}, max_steps: 4, learning_rate: 0.2}]}",
    ],
}


def test_plan_of_boosted_trees_is_that_of_their_features(tmp_path):
    boosted = ["model.framework=mlforecast", "model.config={model_type: lightgbm, lags: [1, 2]}"]
    config, _ = prepared(tmp_path, firms(), *FIRMS, *boosted, "training.max_steps=7")
    found = plan_of(config, calibrate=True)
    # Of 14 years, 13 differences; two lags, a mean and a deviation.
    assert (found.rows, found.features) == (11 * 13, 4)
    assert found.memory == 11 * 13 * 4 * 9
    assert (found.series, found.steps, found.parameters) == (11, 7, 0)
    assert found.step_seconds > 0
    assert found.seconds == pytest.approx(7 * found.step_seconds)
    assert any(line.startswith("time ") and "measured" in line for line in found.lines())


def test_plan_of_a_network_counts_its_weights(tmp_path):
    fields = [*NETWORK, "training.global_batch_size=32", "training.micro_batch_size=8"]
    config, data = prepared(tmp_path, firms(), *FIRMS, *fields, "training.max_steps=5")
    found = plan_of(config)
    network = Forecasting(config, data).build_model()
    weights = sum(weight.numel() for weight in network.parameters())
    # Values and whether they are there, of 24 years; each layer has a bias.
    assert found.features == 48
    assert found.parameters == weights == 48 * 16 + 16 + 2 * (16 * 16 + 16) + 16 * 9 + 9
    assert found.memory == 16 * weights + 8 * 48 * 4 + 11 * 14 * 8
    assert (found.steps, found.seconds) == (5, None)
    assert plan_of(config, calibrate=True).seconds > 0


def test_design_of_series_has_the_ranks_of_a_network_and_its_cost(tmp_path):
    config, _ = prepared(tmp_path, firms(), *FIRMS, *NETWORK, "training.max_steps=5")
    fields = [f"data.source=[{tmp_path / 'table.csv'}]", *FIRMS, *NETWORK, "run=series"]
    fields += ["training.max_steps=5", "compute.price_per_hour=2", "compute.budget_usd=9"]
    sets = [part for item in fields for part in ("--set", item)]
    words = ["design", "--task", "timeseries", "--output", config.output, *sets]
    done = CliRunner().invoke(app, [*words, "--gpu-count", "2", "--memory-gb", "1e-6", "--json"])
    told = json.loads(done.stdout)
    jsonschema.validate(told, schema())
    ranks = told["distributed_config"]
    assert (ranks["strategy"], ranks["world_size"]) == ("data_parallel", 2)
    assert "--nproc-per-node=2" in ranks["launch"]["torchrun"]
    assert told["pipeline_config"]["deployment"]["training_pods"]["count"] == 1
    cost = told["cost_estimate"]
    assert (cost["hourly_cost_usd"], cost["within_budget"], cost["unknown"]) == (2, True, [])
    assert cost["total_cost_usd"] == 2 * cost["estimated_duration_hours"] > 0
    assert done.exit_code == 1
    assert any("take a larger machine" in problem for problem in told["problems"])
    refused = CliRunner().invoke(app, [*words, "--gpu-type", "h100"])
    assert "--gpu-type: a plan for forecasting does not have it" in str(refused.exception)


@pytest.mark.parametrize("model", ["boosted", "statistical", "network", "ensemble"])
def test_plan_before_the_preprocess_step_is_that_after_it(tmp_path, model):
    fields = [*FIRMS, *MODELS[model], "training.max_steps=2", f"output={tmp_path / 'runs'}"]
    after = plan_of(prepared(tmp_path, firms(), *fields)[0])
    source = tmp_path / "table.csv"
    before = plan_of(series_config(source, *fields, "run=new"))
    assert replace(before, rows_from=after.rows_from) == after
    assert "prepared for this plan" in before.rows_from
    whole = plan_of(series_config(source, *fields), data_bytes=10 * source.stat().st_size)
    assert (whole.series, whole.rows) == (10 * after.series, 10 * after.rows)
    assert whole.memory > after.memory


def test_plan_refuses_what_it_does_not_read(tmp_path):
    source = tmp_path / "table.csv"
    config, _ = prepared(tmp_path, firms(), *FIRMS, "model.config={model_type: auto_ets}")
    assert plan_of(config).memory == 11 * 14 * 8
    fields = [f"data.source=[{source}]", *FIRMS, "model.config={model_type: auto_ets}"]
    sets = [part for item in fields for part in ("--set", item)]
    command = ["plan", "series", "--output", config.output, "--run", "series", *sets]
    shown = CliRunner().invoke(app, command)
    assert shown.exit_code == 0, shown.output
    assert "11 with 154 values" in shown.output
    told = json.loads(CliRunner().invoke(app, [*command, "--json"]).stdout)
    cost = follows_the_schema(told)["cost_estimate"]
    assert cost["estimated_duration_hours"] == pytest.approx(told["seconds"] / 3600)
    assert told["distributed_config"]["strategy"] == "none"
    assert told["pipeline_config"]["deployment"]["training_pods"] is None
    refused = CliRunner().invoke(app, [*command, "--gpu=h100"])
    assert "--gpu: a plan for forecasting does not have it" in str(refused.exception)
