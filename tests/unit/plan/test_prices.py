"""List prices of providers, and an order by cost that leaves out what has no price."""

from __future__ import annotations

import datetime

import pytest
from typer.testing import CliRunner

from steadytrain.components.plan.plan import plan_training
from steadytrain.components.plan.render import render
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.sizing.hardware import (
    all_gpus,
    find_gpu,
    price_lists,
    priced,
    priced_by,
)
from steadytrain.pipelines.cli import app

PROVIDERS = {"aws", "gcp", "azure", "lambda", "runpod", "modal"}


def test_each_list_price_has_a_source_and_a_day_and_each_gpu_is_known():
    assert {each.provider for each in price_lists()} == PROVIDERS
    for each in price_lists():
        assert each.source
        assert each.via.startswith("https://")
        assert datetime.date(2026, 1, 1) < each.checked <= datetime.date(2026, 11, 27)
        for name, price in each.gpus.items():
            assert name == "CPU" or find_gpu(name).name == name
            assert price.usd_per_hour
            assert not price.spot_usd_per_hour or price.spot_usd_per_hour < price.usd_per_hour


def test_rule_of_prices_and_speeds_is_the_default():
    rule = {
        "T4": (1, 0.35),
        "V100": (3, 2.5),
        "A100-40": (5, 3.5),
        "A100-80": (5, 5),
        "H100": (8, 8),
    }
    assert {name: (find_gpu(name).speed, find_gpu(name).usd_per_hour) for name in rule} == rule
    assert all(gpu.best_for for gpu in all_gpus())


def test_plan_costs_what_the_provider_asks(configure):
    table, core, origin = priced_by("aws")
    assert core == 0.0408
    gpu = find_gpu("h100", table)
    plan = plan_training(configure(), table, gpu, prices=origin)
    assert plan.offer.usd.high == pytest.approx(6.88 * plan.offer.hours.high)
    assert plan.offer.spot_usd is None
    text = render(plan)
    assert "aws's list prices as published, checked 2026-01-21 to 2026-11-09" in text
    of_aws = {"T4", "V100", "V100-16", "A10", "A100-40", "A100-80", "L4", "L40S"}
    assert {offer.gpu for offer in plan.cheapest} == of_aws | {"H100", "H200", "B200"}
    assert "no price, so not in the order above: 7 (RTX4060, " in text
    assert "A30" in [offer.gpu for offer in plan.without_price]
    assert plan.as_data()["prices"] == origin


def test_comparison_says_that_methods_differ(make_plan):
    plan = make_plan("h100", table=all_gpus())
    assert plan.methods == ["lora", "qlora"]
    assert "train differently (lora, qlora)" in render(plan)
    alike = make_plan("h100", model__adapter__kind="lora", table=all_gpus())
    assert alike.methods == ["lora"]
    assert "train differently" not in render(alike)


def test_two_prices_of_one_gpu_are_refused(tmp_path):
    path = tmp_path / "prices.yaml"
    path.write_text("h100: {usd_per_hour: 1}\nH100: {usd_per_hour: 2}")
    with pytest.raises(BadInput, match="line 2: h100 and H100 are the same device"):
        priced(path)


@pytest.mark.parametrize(
    ("line", "message", "fix"),
    [
        ("H100: {usd_per_hour: -1}", "line 2: H100.usd_per_hour: .*greater than", "spot_usd"),
        ("H100: {spot_usd_per_hour: 1e308}", "line 2: H100.spot_usd_per_hour", "spot_usd"),
        ("H100: {usd_per_hour: .nan}", "H100.usd_per_hour: is not a finite", "finite"),
        ("H100: {usd: 1}", "line 2: H100.usd: ", "spot_usd"),
        ("H100: 8", "line 2: H100: ", "spot_usd"),
        ("cpu: {spot_usd_per_hour: 1}", "line 2: cpu.spot_usd_per_hour: ", "leave it out"),
        (
            "H1000: {usd_per_hour: 8}",
            "line 2: GPU 'H1000': the plan's table has no",
            "one of RTX4050",
        ),
    ],
)
def test_prices_that_cannot_be_used_name_line_field_and_fix(tmp_path, line, message, fix):
    path = tmp_path / "prices.yaml"
    path.write_text(f"T4: {{usd_per_hour: 1}}\n{line}\n")
    with pytest.raises(BadInput, match=message) as error:
        priced(path)
    assert fix in error.value.remedy


def test_old_list_prices_are_doubted():
    first = min(each.checked for each in price_lists() if each.provider == "aws")
    assert "days old" not in priced_by("aws", first + datetime.timedelta(180)).origin
    assert "some are 181 days old" in priced_by("aws", first + datetime.timedelta(181)).origin


def test_unknown_provider_and_two_sources_of_prices_are_refused(tmp_path):
    with pytest.raises(BadInput, match="price table does not have it"):
        priced_by("nobody")
    path = tmp_path / "prices.yaml"
    path.write_text("H100: {usd_per_hour: 1}")
    line = ["plan", "causal-lm", "--formula", "--provider=aws", f"--prices={path}"]
    result = CliRunner().invoke(app, line)
    assert "both give prices" in str(result.exception)
