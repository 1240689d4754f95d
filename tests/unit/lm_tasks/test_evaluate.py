"""lm-eval tasks in the evaluate step: scores, records, pages, and the gate."""

import re
from pathlib import Path

import mlflow
import pyarrow.parquet as pq
import pytest

from steadytrain.components.evaluate.step import run as evaluate
from steadytrain.components.register.step import promote
from steadytrain.components.register.step import run as register
from steadytrain.components.report.explain import summary
from steadytrain.components.shared.config import from_mapping
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.records import EvaluationRecord
from steadytrain.components.shared.tracking import parent_run
from steadytrain.components.shared.tracking.connect import open_tracking
from steadytrain.components.shared.tracking.finish import finish_run
from steadytrain.components.shared.workspace import Workspace

from support.lm_tasks import DOCUMENTS, judged_run, write_tasks

METRICS = {
    "choosing/acc",
    "choosing/acc_norm",
    "reading/word_perplexity",
    "reading/bits_per_byte",
    "answering/exact_match",
}


@pytest.fixture
def tasks(tmp_path):
    return write_tasks(tmp_path / "tasks")


@pytest.fixture
def judge(tmp_path, tasks):
    def run(name="run", **gate):
        section = {"bootstrap_samples": 200, "tasks": list(tasks.values())}
        config = judged_run(tmp_path / "output", name, evaluation=section, gate=gate)
        return config, *evaluate(config)

    return run


@pytest.mark.slow
def test_every_task_is_scored_with_its_error_and_stays_with_the_run(judge):
    config, evaluation, gate = judge(floors={"choosing/acc": 0.0, "reading/bits_per_byte": 100.0})
    # It reaches the floors. No guess is better than chance.
    assert "floor" not in gate.reason
    assert "limit" not in gate.reason
    assert set(evaluation.tasks) == METRICS
    for score in evaluation.tasks.values():
        assert score.examples == len(DOCUMENTS)
        assert score.stderr is not None
        assert score.stderr >= 0
    assert evaluation.tasks["reading/bits_per_byte"].stderr > 0
    assert evaluation.tasks["reading/bits_per_byte"].greater_is_better is False
    workspace = Workspace.of(config)
    assert EvaluationRecord.load(workspace.record("evaluate")) == evaluation
    assert "choosing/acc_norm" in (workspace.evaluation / "evaluation.html").read_text()
    assert any("tasks: choosing/acc " in line for line in summary(workspace))
    answers = pq.read_table(evaluation.answers).to_pylist()
    values = [row["value"] for row in answers if row["metric"] == "choosing/acc"]
    assert sum(values) / len(values) == evaluation.tasks["choosing/acc"].value


@pytest.mark.slow
@pytest.mark.parametrize(
    ("floor", "value", "reason"),
    [
        ("choosing/acc", 1.1, "choosing/acc .* is below its floor 1.1"),
        ("reading/bits_per_byte", 0.1, "reading/bits per byte .* is above its limit 0.1"),
    ],
)
def test_task_floor_blocks_promotion(judge, floor, value, reason):
    _, _, gate = judge(floors={floor: value})
    assert not gate.promoted
    assert re.search(reason, gate.reason)


@pytest.mark.slow
def test_changed_task_data_repeat_the_evaluation(judge, tasks):
    config, first, _ = judge()
    again, _ = evaluate(config)
    assert again == first
    data = Path(tasks["choosing"]).parent / "documents.jsonl"
    data.write_text("\n".join(data.read_text().splitlines()[:5]))
    changed, _ = evaluate(config)
    assert changed.tasks["choosing/acc"].examples == 5


@pytest.mark.slow
def test_gate_can_compare_by_a_task_metric(tmp_path, tasks):
    def start_run(run, **how):
        return judged_run(
            tmp_path / "output",
            run,
            evaluation={"bootstrap_samples": 200, "tasks": [tasks["reading"]]},
            gate={"metric": "reading/bits_per_byte", "min_units": 2},
            **how,
        )

    first = start_run("first", lessons=3)
    _, gate = evaluate(first)
    assert gate.promoted, gate.reason
    assert gate.metric == "reading/bits_per_byte"
    register(first)
    promote(first)

    better = start_run("better", lessons=10)
    evaluation, gate = evaluate(better)
    assert gate.promoted, gate.reason
    reached = evaluation.tasks["reading/bits_per_byte"].value
    assert gate.candidate == reached
    assert gate.champion > reached
    assert gate.improvement.value == pytest.approx((gate.champion - reached) / gate.champion)

    other = start_run("other", kind="gpt2")
    assert not evaluate(other)[1].promoted


def coded(folder, code):
    """Write a task that computes its results with its own code."""
    path = Path(write_tasks(folder)["choosing"])
    (folder / "coded_utils.py").write_text(f"def found(doc, results):\n    {code}\n")
    path.write_text(path.read_text()[:-1] + ', "process_results": !function coded_utils.found}')
    return str(path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "said"),
    [
        (
            "return {'acc': float('nan')}",
            "gate.metric = 'choosing/acc': .* no finite value of it",
        ),
        ("raise KeyError('lost')", "choosing cannot be run by lm-eval: KeyError: 'lost'"),
    ],
)
def test_failing_task_code_is_reported(tmp_path, code, said):
    section = {"bootstrap_samples": 200, "tasks": [coded(tmp_path / "tasks", code)]}
    gate = {"metric": "choosing/acc"}
    config = judged_run(tmp_path / "output", "run", evaluation=section, gate=gate)
    with pytest.raises(BadInput, match=said):
        evaluate(config)


@pytest.mark.slow
def test_custom_task_metrics_are_means(tmp_path):
    code = "return {'acc': 1.0, 'added': 0.5}"
    section = {"bootstrap_samples": 200, "tasks": [coded(tmp_path / "tasks", code)]}
    evaluation, _ = evaluate(judged_run(tmp_path / "output", "run", evaluation=section))
    assert evaluation.tasks["choosing/added"].value == 0.5


@pytest.mark.slow
def test_empty_context_begins_like_a_text(tmp_path):
    path = write_tasks(tmp_path / "tasks", answering={"doc_to_text": ""})["answering"]
    section = {"bootstrap_samples": 200, "tasks": [path]}
    evaluation, _ = evaluate(judged_run(tmp_path / "output", "run", evaluation=section))
    assert evaluation.tasks["answering/exact_match"].examples == len(DOCUMENTS)


@pytest.mark.slow
def test_scores_and_errors_are_metrics_of_the_mlflow_run(judge):
    config, evaluation, _ = judge()
    workspace = Workspace.of(config)
    run_id = parent_run(config, workspace)
    assert finish_run(config, workspace, True)
    mlflow.set_tracking_uri(open_tracking(config, workspace).uri)
    logged = mlflow.get_run(run_id).data.metrics
    for name, score in evaluation.tasks.items():
        assert logged[name] == score.value
        assert logged[f"{name}_stderr"] == score.stderr


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"gate": {"floors": {"a/acc": 0.5}}}, "evaluation.tasks is empty"),
        ({"gate": {"metric": "a/acc"}}, "evaluation.tasks is empty"),
        ({"evaluation": {"tasks": ["a", "a"]}}, "'a' appears twice"),
        ({"gate": {"floors": {"acc": 0.5}}}, "acc in steadytrain.metrics"),
    ],
)
def test_incompatible_settings_are_rejected(change, said):
    content = {"name": "a", "data": {"source": ["x"]}, "model": {"base": "y"}}
    with pytest.raises(Exception, match=said):
        from_mapping(content | change)
