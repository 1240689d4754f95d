"""Plans of tables: their matrix and the threads, from prepared data or from the first records."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from steadytrain.components.automl.task import task_of
from steadytrain.components.plan import tables
from steadytrain.components.plan.prepared_sample import known_data
from steadytrain.components.plan.tables import plan_table
from steadytrain.components.preprocess.step import run as preprocess
from steadytrain.components.shared.config import load
from steadytrain.components.shared.errors import BadInput, DataError
from steadytrain.components.tabular import model as exported
from steadytrain.components.train.step import load_trainer
from steadytrain.pipelines.cli import app
from steadytrain.pipelines.questionnaire import Answers, Questionnaire, unasked
from steadytrain.pipelines.sources import Selection

ROWS = 60


@pytest.fixture
def config(tmp_path):
    lines = [f"{n * 3},{'ab'[n % 2]},2024-05-{n % 28 + 1:02},same" for n in range(ROWS)]
    (tmp_path / "table.csv").write_text("\n".join(["size,kind,day,constant", *lines]))
    given = {"data.source": [str(tmp_path / "table.csv")], "data.target": "kind"}
    return load("tabular", {**given, "output": str(tmp_path / "output")})


def test_plan_of_a_table_has_its_matrix_before_and_after_preprocessing(config):
    first = plan_table(config)
    # A date is day, month, day of the week and hour.
    assert (first.columns, first.width) == (2, 5)
    assert (first.rows, first.memory) == (ROWS, ROWS * 5 * 8)
    assert (first.threads, first.steps) == (1, 50)
    assert any("constant" in remark for remark in first.remarks)
    data = preprocess(config)
    prepared = plan_table(config)
    assert prepared.rows == data.sides["train"].rows + data.sides["validation"].rows < ROWS
    assert prepared.width == first.width
    assert prepared.source == "the prepared data"
    assert "matrix   " in "\n".join(prepared.lines())


def test_large_table_that_is_not_prepared_has_no_rows_yet(config, monkeypatch):
    monkeypatch.setattr(tables, "_READ", 30)
    plan = plan_table(config)
    assert (plan.rows, plan.memory, plan.threads) == (None, None, None)
    assert "40 MB for each million rows" in "\n".join(plan.lines())


def test_table_without_its_target_is_refused_with_the_reason(config):
    other = config.model_copy(update={"data": config.data.model_copy(update={"target": "price"})})
    with pytest.raises(DataError, match=r"of the first .* records can be used: .*'?price"):
        plan_table(other)


def test_table_of_its_target_alone_is_refused(config, tmp_path):
    (tmp_path / "table.csv").write_text("kind\n" + "a\nb\n" * 9)
    with pytest.raises(DataError, match="be learned from: the target is the only one"):
        plan_table(config)


def test_table_without_a_row_is_refused_as_empty(config, tmp_path):
    (tmp_path / "table.csv").write_text("size,kind\n")
    with pytest.raises(DataError, match="no record is there"):
        plan_table(config)
    with pytest.raises(DataError, match="no record is there"):
        task_of({"source": list(config.data.source), "target": "kind"})


def test_init_plans_the_tables_of_a_package_for_the_cpu(config, tmp_path, monkeypatch):
    module = f"tables_{abs(hash(tmp_path))}"
    task = "from steadytrain.components.tabular.tasks import TABULAR_CLASSIFICATION as TASK\n"
    (tmp_path / f"{module}.py").write_text(task)
    monkeypatch.syspath_prepend(tmp_path)
    data = {"data.source": config.data.source, "data.target": "kind", "data.task": f"{module}:TASK"}

    def choose(overrides):
        return Selection(load("tabular", [*data.items(), *overrides]), ())

    with Questionnaire(choose, ()) as questions:
        assert {"--gpu-type", "--goal"} <= {*unasked(questions.selection.config)}
        questions.take_each(Answers(cores=2))
    assert "matrix 2.4 kB; threads 1" in questions.changes[0].after


def test_plan_command_shows_a_table_and_refuses_what_it_does_not_read(config):
    sets = [f"data.source=[{config.data.source[0]}]", "data.target=kind"]
    command = ["plan", "tabular", *(part for item in sets for part in ("--set", item))]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert f"rows     {ROWS}" in result.output
    hardware = ("--gpu=h100", "--nodes=2", "--gpus-per-node=2", "--host-memory-gb=9")
    for option in hardware:
        result = CliRunner().invoke(app, [*command, option])
        assert option.partition("=")[0] in str(result.exception), option


def test_plan_of_a_table_writes_its_configuration(linear, tmp_path):
    (tmp_path / "own.yaml").write_text(linear.to_yaml())
    command = ["plan", str(tmp_path / "own.yaml"), f"--write={tmp_path / 'planned'}"]
    assert CliRunner().invoke(app, command).exit_code == 0
    written = tmp_path / "planned" / "steadytrain.yaml"
    assert load(written) == linear
    why = json.loads((written.parent / "training_args.json").read_text())
    assert (why["arguments"], why["script"]) == ({}, None)
    assert why["refused"] == [
        "model.framework sklearn: Trainer trains PyTorch models of Transformers"
    ]


@pytest.fixture
def linear(config):
    model = {"framework": "sklearn", "config": {"model_type": "linear"}}
    return config.model_copy(update={"model": config.model.model_copy(update=model)})


def test_time_of_a_table_without_a_formula_is_measured_and_scaled(linear):
    unknown = plan_table(linear)
    assert unknown.hours is None
    assert "times a step" in unknown.unknown_time
    found = plan_table(linear, hours=True)
    assert found.hours.low == found.hours.high > 0
    assert any("a step on this machine" in line for line in found.lines())
    whole = plan_table(linear, 1000 * Path(linear.data.source[0]).stat().st_size, hours=True)
    assert whole.hours.low > 20 * found.hours.low


def test_design_of_a_table_costs_what_its_cores_cost(linear, tmp_path):
    (tmp_path / "prices.yaml").write_text("CPU: {usd_per_hour: 7}")
    (tmp_path / "own.yaml").write_text(linear.to_yaml())
    command = ["design", str(tmp_path / "own.yaml"), f"--prices={tmp_path / 'prices.yaml'}"]
    cost = json.loads(CliRunner().invoke(app, [*command, "--json"]).stdout)["cost_estimate"]
    assert (cost["hourly_cost_usd"], cost["unknown"]) == (7, [])
    assert cost["total_cost_usd"] == pytest.approx(7 * cost["estimated_duration_hours"])
    assert cost["total_cost_usd"] > 0


def test_plan_of_a_table_over_its_budget_exits_with_1(linear, tmp_path):
    (tmp_path / "prices.yaml").write_text("CPU: {usd_per_hour: 7}")
    (tmp_path / "own.yaml").write_text(linear.to_yaml())
    command = ["plan", str(tmp_path / "own.yaml"), f"--prices={tmp_path / 'prices.yaml'}"]
    assert CliRunner().invoke(app, [*command, "--budget-usd=9"]).exit_code == 0
    done = CliRunner().invoke(app, [*command, "--budget-usd=1e-9"])
    assert done.exit_code == 1
    assert "problem compute.budget_usd = 1e-09: training is expected to cost" in done.output


def stored_by(config, steps):
    """Return the bytes of the state and of the exported files after some real steps."""
    with known_data(config) as known, tempfile.TemporaryDirectory() as folder:
        learner = load_trainer(config.model.framework).learner(config, known.record)
        for _ in range(steps):
            learner.learn((), learning_rate_scale=1.0)
        learner.export(Path(folder))
        files = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
        return sum(array.nbytes for array in learner.state().values()), files


STEPS = 6
BOOSTED = [
    ("lightgbm", {"num_leaves": 7}),
    ("lightgbm", {"max_depth": 2}),
    ("xgboost", {"max_depth": 3}),
    ("xgboost", {"grow_policy": "lossguide", "max_leaves": 6}),
    ("catboost", {"depth": 4}),
    ("catboost", {"rounds_per_step": 1}),
]


def vote(framework, model, **data):
    return load(
        "vote",
        {
            "training.max_steps": STEPS,
            "model.framework": framework,
            "model.config": model,
            **data,
        },
    )


@pytest.mark.slow
@pytest.mark.parametrize(("framework", "given"), BOOSTED)
@pytest.mark.parametrize("target", ["vote", "educ"])
def test_boosted_trees_store_at_most_what_the_plan_says(framework, given, target):
    # Of education, there are seven classes.
    data = {"data.target": target} | ({"data.labels": None} if target == "educ" else {})
    config = vote(framework, {"model_type": framework, **given}, **data)
    planned = plan_table(config).stored.checkpoint
    state, _ = stored_by(config, STEPS)
    assert state <= planned <= 2 * state


@pytest.mark.slow
@pytest.mark.parametrize(
    ("framework", "model"),
    [
        *(("sklearn", name) for name in ("random_forest", "hist_boosting", "linear", "knn")),
        ("pytorch_tables", "mlp"),
    ],
)
def test_other_models_store_what_a_few_steps_let_expect(framework, model):
    config = vote(framework, {"model_type": model})
    planned = plan_table(config, hours=True).stored
    state, files = stored_by(config, STEPS)
    assert planned.checkpoint == pytest.approx(state, rel=0.1)
    assert planned.model == pytest.approx(files, rel=0.1)


@pytest.mark.slow
def test_ensemble_stores_and_takes_what_its_members_do():
    members = [
        {"framework": "sklearn", "config": {"model_type": "linear"}, "max_steps": 1},
        {
            "framework": "lightgbm",
            "config": {"model_type": "lightgbm", "num_leaves": 7},
            "max_steps": 12,
        },
    ]
    model = {"model_type": "ensemble", "members": members}
    config = vote("ensemble", model, **{"training.max_steps": len(members)})
    planned = plan_table(config, hours=True)
    state, files = stored_by(config, len(members))
    assert planned.stored.checkpoint == pytest.approx(state, rel=0.1)
    # Each member is counted with the source of its class, which an ensemble has once.
    source = Path(exported.__file__).stat().st_size
    assert planned.stored.model == pytest.approx(files + source, rel=0.1)
    assert planned.hours.low == planned.hours.high > 0


def test_neighbors_of_more_records_are_a_larger_model(linear):
    model = {"framework": "sklearn", "config": {"model_type": "knn", "n_neighbors": 2}}
    config = linear.model_copy(update={"model": linear.model.model_copy(update=model)})
    few, many = (
        plan_table(found, times * Path(config.data.source[0]).stat().st_size, hours=True).stored
        for found, times in ((config, 1), (config, 100))
    )
    assert many.model > 50 * few.model


def test_trees_without_any_limit_have_no_size_before_their_rows_are_known(config, monkeypatch):
    model = {"framework": "xgboost", "config": {"model_type": "xgboost", "max_depth": 0}}
    deep = config.model_copy(update={"model": config.model.model_copy(update=model)})
    assert plan_table(deep).stored.model > 0
    monkeypatch.setattr(tables, "_READ", 30)
    assert plan_table(deep).stored is None


def test_time_that_cannot_be_measured_says_why(linear, monkeypatch):
    def too_large(*_):
        raise BadInput("they are too large", remedy="")

    monkeypatch.setattr(tables, "known_data", too_large)
    found = plan_table(linear, hours=True)
    assert found.hours is None
    assert found.unknown_time.endswith("they are too large")
    with pytest.raises(BadInput, match="too large"):
        plan_table(linear, calibrate=True)
