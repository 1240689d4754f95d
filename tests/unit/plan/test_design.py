"""Designs: pipeline, distribution and cost under their published names."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml
from datasets import Dataset
from typer.testing import CliRunner

from steadytrain.components.plan.design import schema, schema_of_plans, source_bytes
from steadytrain.components.plan.tables import plan_table
from steadytrain.components.shared.config import load
from steadytrain.components.sizing.hardware import find_gpu
from steadytrain.pipelines.cli import app
from steadytrain.pipelines.compile import compile_pipeline, read_pipeline, steps
from steadytrain.pipelines.pod_names import MOUNT_PATH
from steadytrain.pipelines.server.schedule_file import configuration, read_schedules

from support.designed import follows_the_schema
from support.golden import assert_golden
from support.pictures import image_config, noise, write_folders

GOLDEN = Path(__file__).parent / "golden" / "designs"
STEPS = ("--set", "training.max_steps=1000")
CPU = ("--set", "compute.device=cpu")
DESIGNS = {
    "8b-one-6gb-card": (
        *("chat", "--gpu-type", "rtx4050", *STEPS, "--memory-gb", "32"),
        *("--set", "model.base=hub:meta-llama/Llama-3.1-8B", "--set", "data.sequence_length=512"),
    ),
    "13b-8xa100": (
        *("chat", "--gpu-type", "a100", "--gpu-count", "8", "--budget-usd", "100", *STEPS),
        *("--set", "model.base=hub:meta-llama/Llama-2-13b-hf"),
    ),
    "50gb-table-xgboost": (
        *("--task", "tabular", "--framework", "xgboost", "--data", "trades.csv"),
        *("--data-gb", "50", "--memory-gb", "512", "--storage-gb", "200", "--budget-usd", "100"),
        *("--set", "data.target=label", "--set", "compute.price_per_hour=4"),
        *("--set", "compute.threads_per_rank=16"),
    ),
}
"""Of a table, the file is a sample with 200 records of 30 numbers with four digits."""


def write_table(folder):
    numbers = random.Random(0)
    lines = [",".join([*(f"x{column}" for column in range(30)), "label"])]
    lines += [
        ",".join([*(f"{numbers.random():.4f}" for _ in range(30)), ("up", "down")[row % 2]])
        for row in range(200)
    ]
    (folder / "trades.csv").write_text("\n".join(lines) + "\n")


@pytest.fixture
def call(tmp_path, monkeypatch):
    write_table(tmp_path)
    monkeypatch.chdir(tmp_path)

    def run(*words):
        return CliRunner().invoke(app, list(words))

    return run


@pytest.mark.parametrize("name", DESIGNS)
def test_design_equals_the_golden_file_and_follows_the_schema(call, name):
    done = call("design", *DESIGNS[name], "--json")
    assert done.exit_code == 0, done.output
    content = json.loads(done.stdout)
    jsonschema.validate(content, schema())
    assert_golden(GOLDEN / f"{name}.json", done.stdout)


@pytest.mark.slow
def test_text_classification_stands_for_the_task_of_that_kind(call):
    done = call("design", "--task", "text_classification", "--json")
    named = call("design", "--task", "sequence_classification", "--json")
    assert (done.exit_code, named.exit_code) == (0, 0), done.output
    assert json.loads(done.stdout) == json.loads(named.stdout)
    assert "text_classification stands for data.task sequence_classification" in done.stderr
    assert "stands for" not in named.stderr


def test_plan_has_the_same_three_objects(call):
    settings = DESIGNS["13b-8xa100"][5:]
    budget = ("--set", "compute.budget_usd=100")
    done = call(
        *("plan", "chat", "--gpu", "a100", "--gpus-per-node", "8", "--formula", "--json"),
        *(*budget, *settings[settings.index("--set") :]),
    )
    assert done.exit_code == 0, done.output
    plan = json.loads(done.stdout)
    design = json.loads((GOLDEN / "13b-8xa100.json").read_text())
    follows_the_schema(plan)
    names = ("pipeline_config", "distributed_config", "cost_estimate")
    assert {name: plan[name] for name in names} == {name: design[name] for name in names}
    assert (plan["cost_estimate"]["total_cost_usd"] is None) is False


def test_cost_is_hours_times_the_price_of_all_gpus(call):
    cost = json.loads((GOLDEN / "13b-8xa100.json").read_text())["cost_estimate"]
    assert cost["hourly_cost_usd"] == 8 * find_gpu("a100").usd_per_hour
    span = cost["duration_hours"]
    assert cost["estimated_duration_hours"] ** 2 == pytest.approx(span["low"] * span["high"])
    product = cost["hourly_cost_usd"] * cost["estimated_duration_hours"]
    assert cost["total_cost_usd"] == pytest.approx(product)


@pytest.mark.slow
def test_a_design_for_the_cpu_is_for_the_cpu(call):
    design = json.loads(call("design", "causal-lm", *CPU, "--json").stdout)
    assert design["distributed_config"]["backend"] == "gloo"


@pytest.mark.slow
def test_small_hours_and_costs_are_shown_as_numbers(call):
    words = ("design", "chat", "--gpu-type", "a100", "--set", "training.max_steps=1")
    cost = json.loads(call(*words, "--json").stdout)["cost_estimate"]
    shown = [line.split() for line in call(*words).output.splitlines()]
    for name in ("estimated_duration_hours", "total_cost_usd"):
        assert 0 < cost[name] < 0.005
        value = next(line[1] for line in shown if line[:1] == [name])
        assert float(value) == pytest.approx(cost[name], rel=0.05)


def test_steps_are_those_of_the_compiled_pipeline(tmp_path):
    design = json.loads((GOLDEN / "13b-8xa100.json").read_text())
    spec, _ = read_pipeline(compile_pipeline(tmp_path / "pipeline.yaml"))
    found = {step["name"]: step for step in design["pipeline_config"]["steps"]}
    assert sorted(found) == sorted(steps(spec))
    for name, step in found.items():
        container = spec["deploymentSpec"]["executors"][f"exec-{name}"]["container"]
        assert step["image"] == container["image"]
        assert step["function"] == container["args"][-1]
    order = list(found)
    for name, step in found.items():
        assert all(order.index(one) < order.index(name) for one in step["depends_on"])
    assert found["promote"]["condition"] == "evaluate returns true"
    assert {"evaluate", "register"} <= set(found["promote"]["depends_on"])
    assert set(found["report"]["depends_on"]) == set(found) - {"report"}


def test_hours_of_a_table_follow_from_its_values():
    """Rows by the bytes of a record; each tree adds each value once for each of 6 levels."""
    design = json.loads((GOLDEN / "50gb-table-xgboost.json").read_text())
    record = 30 * 7 + len("up\n") + 1
    rows, trees = 50e9 / record, 50 * 10
    work = rows * 30 * 6 * trees
    span = design["cost_estimate"]["duration_hours"]
    assert span["low"] == pytest.approx(work / 3.2e8 / 16 / 3600, rel=0.01)
    assert span["high"] == pytest.approx(work / 1e8 / 8.5 / 3600, rel=0.01)


@pytest.mark.slow
def test_budget_chooses_the_fastest_gpu_that_it_pays(make_plan):
    free = make_plan()
    dear = max(free.cheapest, key=lambda offer: offer.usd.middle)
    for offer in free.cheapest:
        plan = make_plan(compute__budget_usd=offer.usd.middle * 1.001)
        paid = [one for one in free.cheapest if one.usd.middle <= offer.usd.middle]
        fastest = max(paid, key=lambda one: one.tokens_per_second.middle)
        assert plan.offer.tokens_per_second == fastest.tokens_per_second
        assert plan.works
    poor = make_plan(compute__budget_usd=free.cheapest[0].usd.middle / 2)
    least = min(offer.usd.middle for offer in free.cheapest)
    if free.cheapest[0].usd.middle / 2 < least:
        assert not poor.works
        assert "compute.budget_usd" in poor.problems[0]
    given = make_plan(dear.gpu, table=(), compute__budget_usd=dear.usd.middle / 2)
    assert not given.works
    assert given.remedies == [
        "50% of the steps, by training.max_steps or training.num_train_epochs"
    ]


def test_budget_that_cannot_be_checked_is_a_problem(make_plan):
    plan = make_plan("rtx4090", compute__budget_usd=10)
    assert not plan.works
    assert "has none for RTX4090; set compute.price_per_hour" in plan.problems[0]


def test_design_over_its_budget_or_disk_exits_with_1(call):
    done = call("design", *DESIGNS["13b-8xa100"], "--budget-usd", "1", "--storage-gb", "3")
    assert done.exit_code == 1
    assert "over the budget of 1.00 USD" in done.output
    assert "problem compute.budget_usd = 1: training is expected to cost" in done.output
    assert "GB of disk, and 3.0 GB are there" in done.output


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ((*DESIGNS["50gb-table-xgboost"], "--tokens-per-second", "9"), "--tokens-per-second: a"),
        (("images", "--set", "training.goal=best"), "chooses no methods"),
        ((), "needs a configuration or a task"),
        (("--task", "poetry"), "--task poetry: no preset has it"),
        (("chat", "--gpu-count", "12"), "--gpu-count 12: above 8"),
        (("chat", "--gpu-count", "2", *CPU), "--gpu-count: compute.device is cpu"),
        (("chat", "--gpu-type", "any", *CPU), "--gpu-type: compute.device is cpu"),
        ((*DESIGNS["50gb-table-xgboost"], "--gpu-type", "a100"), "--gpu-type: a plan for tab"),
    ],
)
def test_what_cannot_be_designed_is_refused(call, words, part):
    done = call("design", *words)
    assert done.exit_code
    assert part in str(done.exception)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *((name, "0") for name in ("--gpu-count", "--budget-usd", "--memory-gb", "--storage-gb")),
        *((name, "0") for name in ("--data-gb", "--tokens-per-second")),
        *(("--budget-usd", value) for value in ("-5", "nan", "inf", "1e308")),
        *(("--tokens-per-second", value) for value in ("1e-320", "inf")),
        ("--data-gb", "1e-30"),
        ("--gpu-count", "129"),
    ],
)
def test_number_that_would_be_ignored_or_overflow_is_refused(call, option, value):
    done = call("design", "chat", option, value)
    assert done.exit_code == 2
    assert option in done.output
    assert "is not a number from" in done.output


@pytest.mark.parametrize("command", ["plan", "design"])
def test_files_do_not_go_where_nobody_asked_for_them(call, tmp_path, command):
    whole = "# mine\n" + load("causal-lm").to_yaml()
    (tmp_path / "steadytrain.yaml").write_text(whole)
    empty = call(command, "causal-lm", "--write", "")
    assert empty.exit_code == 2
    assert "is empty" in empty.output
    done = call(command, "steadytrain.yaml", "--write", ".")
    assert "is the configuration itself" in str(done.exception)
    assert (tmp_path / "steadytrain.yaml").read_text() == whole


def test_empty_price_table_is_refused_by_name(call, tmp_path):
    (tmp_path / "prices.yaml").write_text("")
    done = call("design", "chat", "--prices", "prices.yaml")
    assert "prices.yaml: the file: " in str(done.exception)


def test_framework_of_tables_for_texts_is_refused_as_the_framework_that_it_is(call):
    done = call("design", "--task", "nlp", "--framework", "xgboost")
    assert done.exit_code
    assert "model.framework" in str(done.exception)
    assert "model.config" not in str(done.exception)


@pytest.mark.slow
def test_written_files_are_those_of_the_design(call, tmp_path):
    done = call("design", *DESIGNS["13b-8xa100"], "--write", "made")
    assert done.exit_code == 0, done.output
    made = tmp_path / "made"
    jsonschema.validate(json.loads((made / "design.json").read_text()), schema())
    assert load(made / "steadytrain.yaml").compute.strategy == "zero3"
    assert yaml.safe_load((made / "accelerate.yaml").read_text())["num_processes"] == 8
    assert len(list(yaml.safe_load_all((made / "trainjob.yaml").read_text()))) == 2
    assert read_pipeline(made / "pipeline.yaml")[0]["pipelineInfo"]["name"]
    assert {path.name for path in made.glob("*.sh")} == {"torchrun.sh", "accelerate.sh"}


@pytest.mark.parametrize("name", ["13b-8xa100", "50gb-table-xgboost"])
def test_written_schedule_is_what_the_trigger_applies(call, tmp_path, name):
    words = () if name == "13b-8xa100" else ("--set", "data.source=[s3://bucket/trades.csv]")
    done = call("design", *DESIGNS[name], *words, "--write", "made")
    assert done.exit_code == 0, done.output
    made = tmp_path / "made"
    design = json.loads((made / "design.json").read_text())
    triggers = {each["kind"]: each["command"] for each in design["pipeline_config"]["triggers"]}
    file = made / triggers["schedule"].removeprefix("steadytrain schedule apply ")
    (schedule,) = read_schedules(file).schedules
    designed = load(made / "steadytrain.yaml")
    assert configuration(schedule, made) == load(designed.to_yaml(), {"output": MOUNT_PATH})


@pytest.mark.slow
@pytest.mark.parametrize(
    "script", [["torchrun.sh"], ["accelerate.sh", "--main_process_port=0"]], ids=lambda one: one[0]
)
def test_launch_script_starts_the_ranks(call, tmp_path, script):
    words = ("chat", "--gpu-type", "a100", "--gpu-count", "2", *STEPS, "--write", "made")
    base = ("--set", "model.base=hub:Qwen/Qwen2.5-0.5B")
    assert call("design", *words, *base).exit_code == 0
    program = tmp_path / "program.py"
    program.write_text(
        "import pathlib, sys, torch\n"
        "from accelerate import Accelerator\n"
        "ranks = Accelerator(cpu=True)\n"
        "total = ranks.reduce(torch.tensor(ranks.process_index + 1.0), 'sum')\n"
        "pathlib.Path(sys.argv[1], str(ranks.process_index)).write_text(str(total.item()))\n"
        # Without it, a thread of gloo may abort the process at its end.
        "ranks.end_training()\n"
    )
    (tmp_path / "ranks").mkdir()
    binary = Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{binary}:{os.environ['PATH']}"}
    words = ["sh", *script, "../program.py", "../ranks"]
    subprocess.run(words, cwd=tmp_path / "made", env=environment, check=True, timeout=600)
    found = {path.name: path.read_text() for path in (tmp_path / "ranks").iterdir()}
    assert found == {"0": "3.0", "1": "3.0"}


@pytest.mark.slow
def test_price_of_inference_follows_from_the_throughput(call):
    done = call("design", *DESIGNS["13b-8xa100"], "--tokens-per-second", "5000", "--json")
    content = json.loads(done.stdout)
    jsonschema.validate(content, schema())
    served = content["cost_estimate"]["inference"]
    hours = 1e6 / 5000 / 3600
    price = hours * 8 * find_gpu("a100").usd_per_hour
    assert served["usd_per_million_tokens"] == pytest.approx(price)
    words = ("plan", "chat", "--formula", *STEPS, "--gpu", "rtx4090", "--tokens-per-second", "5000")
    unpriced = json.loads(call(*words, "--json").stdout)
    assert unpriced["cost_estimate"]["inference"]["usd_per_million_tokens"] is None
    assert "set compute.price_per_hour" in unpriced["cost_estimate"]["inference"]["unknown"]
    assert "not known (price: " in call(*words).stdout


@pytest.mark.slow
def test_plan_shows_the_disk_space_that_a_design_does(call, tmp_path):
    words = ("--set", "data.target=label", "--set", f"data.source=[{tmp_path}/trades.csv]")
    table = json.loads(call("plan", "tabular", *words, "--json").stdout)
    size = (tmp_path / "trades.csv").stat().st_size
    parts = follows_the_schema(table)
    assert parts["distributed_config"]["world_size"] == 1
    design = json.loads((GOLDEN / "50gb-table-xgboost.json").read_text())
    assert parts["pipeline_config"] == design["pipeline_config"]
    assert table["storage"]["data_gb"] == pytest.approx(2 * size / 1e9)
    settings = DESIGNS["13b-8xa100"][7:]
    text = ("plan", "chat", "--gpu", "a100", "--gpus-per-node", "8", "--formula", *settings)
    plan = json.loads(call(*text, "--json").stdout)
    designed = json.loads((GOLDEN / "13b-8xa100.json").read_text())["storage"]
    assert plan["storage"]["checkpoints_gb"] == designed["checkpoints_gb"]
    assert "storage   data " in call(*text).stdout


def stored(*paths):
    return sum(path.stat().st_size for path in paths)


def test_space_of_the_data_has_saved_data_sets_and_the_files_that_tables_name(tmp_path):
    saved = tmp_path / "saved"
    Dataset.from_dict({"text": ["one", "two"]}).save_to_disk(saved)
    given = {"output": str(tmp_path / "output"), "data.source": [str(saved)]}
    assert source_bytes(load("causal-lm", given)) == stored(*saved.iterdir()) > 0
    assert source_bytes(load("causal-lm", given | {"data.source": ["hub:some/data"]})) is None
    pictures = tmp_path / "pictures"
    write_folders(pictures, noise(2), "ab")
    table = pictures / "table.csv"
    table.write_text("image,label\na/00000.png,a\nb/00001.png,b\n")
    config = image_config(pictures, "data.columns.image=image")
    assert source_bytes(config) == stored(table, *pictures.glob("*/*.png"))


@pytest.mark.slow
def test_size_of_all_data_scales_a_table_in_a_saved_data_set(tmp_path):
    saved, count = tmp_path / "saved", 40
    columns = {"x": [*range(count)], "label": ["up", "down"] * (count // 2)}
    Dataset.from_dict(columns).save_to_disk(saved)
    config = load("tabular", {"data.source": [str(saved)], "data.target": "label"})
    assert plan_table(config, 10 * stored(*saved.iterdir())).rows == 10 * count


def test_schema_command_prints_what_designs_and_plans_follow(call):
    assert json.loads(call("schema", "--design").stdout) == schema()
    assert json.loads(call("schema", "--plan").stdout) == schema_of_plans()
    assert "each has a schema of its own" in str(call("schema", "--plan", "--design").exception)
    jsonschema.Draft202012Validator.check_schema(schema_of_plans())


@pytest.mark.parametrize("name", ["orchestrator", "steps"])
def test_plan_without_a_promised_field_breaks_its_schema(name):
    plan = json.loads((GOLDEN / "13b-8xa100.json").read_text())
    follows_the_schema(plan)
    del plan["pipeline_config"][name]
    with pytest.raises(jsonschema.ValidationError, match=name):
        follows_the_schema(plan)


def test_design_of_a_task_without_data_names_the_option_for_them(call):
    refused = call("design", "--task", "tabular").exception
    assert "data.source = 'table.csv'" in refused.message
    assert "--data" in refused.remedy
