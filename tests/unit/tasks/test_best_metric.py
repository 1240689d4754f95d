"""A wrong metric for the best model is an error before anything starts."""

from __future__ import annotations

import pytest

from steadytrain.components.shared import plugins
from steadytrain.components.shared.config import from_mapping
from steadytrain.components.shared.config.data_sections import IMAGES, MULTIMODAL, SERIES, TABLES
from steadytrain.components.shared.errors import BadInput, ConfigError
from steadytrain.components.shared.events.types import Validated
from steadytrain.components.tasks.base import load_task
from steadytrain.components.tasks.checks import check_task, greater_is_better
from steadytrain.pipelines.early_checks import check_plugins

from support.task_data import data_of, model_of, write_reference
from support.training import PART_LABELS, Bench, data_sections, events_of

PACKAGED = """
from dataclasses import replace
from steadytrain.components.tasks.base import late
from steadytrain.components.tasks.built_in import SEQUENCE_CLASSIFICATION
from steadytrain.components.tasks.sequence_classification import SequenceClassification

SILENT = replace(SEQUENCE_CLASSIFICATION, training=late(f"{__name__}:Training"))
TOLD = replace(
    SEQUENCE_CLASSIFICATION,
    training=late(f"{__name__}:Training", metrics=lambda config: ("loss", "accuracy", "entropy")),
)


class Training(SequenceClassification):
    def validation_metrics(self, sums):
        return super().validation_metrics(sums) | {"entropy": 0.0}
"""


def config_of(task, metric, **training):
    chosen = {"metric_for_best_model": metric, **training}
    model = {"base": "hub:any"}
    sections = data_sections(task, PART_LABELS)
    return from_mapping({"name": "any", "model": model, "training": chosen, **sections})


BUILT_IN = [name for name in plugins.names(plugins.TASKS) if plugins.is_ours(plugins.TASKS, name)]
OTHERS = (*TABLES, *IMAGES, *SERIES, *MULTIMODAL)
"""Tasks without texts, which have tests of their own."""
SETTINGS = {"text_embedding": {"batch_contrastive": {"rows": 4}}}


@pytest.mark.parametrize(
    ("name", "training"),
    [
        *((name, SETTINGS.get(name, {})) for name in BUILT_IN if name not in OTHERS),
        ("multi_task", {"multi_task": {"loss_weighting": "uncertainty"}}),
    ],
)
def test_task_declares_the_metrics_that_its_validation_reports(tmp_path, name, training):
    model = {"config": model_of(name)}
    if load_task(name).reference:
        model = {"base": write_reference(name, tmp_path / "base")}
    sections = {"max_steps": 1, "eval_steps": 1, "global_batch_size": 4, **training}
    data = data_of(name, tmp_path / "data")
    compute = {"device": "cpu"}
    bench = Bench.make(tmp_path, data, model=model, training=sections, compute=compute)

    own = bench.train_here().parts.task

    (validated,) = events_of(bench.workspace, Validated)
    declared = load_task(name).metrics(bench.config)
    assert sorted(declared) == sorted(validated.metrics)
    assert declared[0] == own.metric


@pytest.mark.parametrize("name", BUILT_IN)
def test_unknown_metric_is_an_error_that_names_the_others(name):
    with pytest.raises(ConfigError, match=r"metric_for_best_model = 'nope'") as caught:
        check_plugins(config_of(name, "nope", greater_is_better=True))
    (problem,) = [item for item in caught.value.problems if "best_model" in item.field]
    assert problem.message == "the task has no such metric"
    assert problem.remedy.startswith("one of loss, ")


@pytest.mark.parametrize(
    ("task", "metric", "accepted"),
    [
        ("causal_lm", "eval_perplexity", True),
        ("sequence_classification", "macro_f1", True),
        ("multi_task", "topic_accuracy", True),
        ("multi_task", "art_accuracy", False),
        ("multi_task", "topic_loss_weight", False),
        # Average weights are compared by the same metric, and have none of their own to choose.
        ("causal_lm", "averaged_loss", False),
    ],
)
def test_known_metric_is_accepted(task, metric, accepted):
    config = config_of(task, metric)
    if accepted:
        check_task(config)
    else:
        with pytest.raises(ConfigError, match="no such metric"):
            check_task(config)


@pytest.mark.parametrize("name", [name for name in BUILT_IN if name not in {"multi_task"}])
def test_every_metric_of_a_task_has_a_direction(name):
    for metric in load_task(name).metrics(config_of(name, None)):
        assert greater_is_better(metric, None) is not None, metric
        check_task(config_of(name, metric, **SETTINGS.get(name, {})))


@pytest.mark.parametrize(
    ("task", "metric", "given"),
    [
        ("causal_lm", "loss", True),
        ("causal_lm", "eval_loss", True),
        ("causal_lm", None, True),
        ("causal_lm", "perplexity", True),
        ("sequence_classification", "accuracy", False),
        ("sequence_classification", "macro_f1", False),
        ("multi_task", "topic_accuracy", False),
        ("multi_task", "topic_loss", True),
    ],
)
def test_direction_that_keeps_the_worst_model_is_an_error(task, metric, given):
    with pytest.raises(ConfigError, match=r"would keep the worst model") as caught:
        check_task(config_of(task, metric, greater_is_better=given))
    (problem,) = caught.value.problems
    assert problem.field == "training.greater_is_better"
    assert problem.remedy == "leave it out"


@pytest.mark.parametrize(
    ("metric", "greater"),
    [("topic_loss", False), ("topic_accuracy", True), ("entropy", None), ("topic_weight", None)],
)
def test_direction_follows_from_the_metric(metric, greater):
    assert greater_is_better(metric, None) is greater
    assert greater_is_better(metric, True) is True


@pytest.mark.parametrize(
    ("name", "metric", "accepted"),
    [
        ("SILENT", "nope", True),
        ("Training", "nope", True),
        ("TOLD", "entropy", True),
        ("TOLD", "nope", False),
    ],
)
def test_task_of_a_package_may_report_other_metrics(tmp_path, monkeypatch, name, metric, accepted):
    module = f"packaged_{abs(hash(tmp_path))}"
    (tmp_path / f"{module}.py").write_text(PACKAGED)
    monkeypatch.syspath_prepend(tmp_path)
    config = config_of(f"{module}:{name}", metric, greater_is_better=True)
    if accepted:
        check_task(config)
    else:
        with pytest.raises(BadInput, match="one of loss, accuracy, entropy"):
            check_task(config)


def test_metric_of_unknown_direction_is_an_error(tmp_path, monkeypatch):
    module = f"packaged_{abs(hash(tmp_path))}"
    (tmp_path / f"{module}.py").write_text(PACKAGED)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"set training\.greater_is_better too"):
        check_task(config_of(f"{module}:TOLD", "entropy"))


@pytest.mark.parametrize(
    ("task", "gate", "field"),
    [
        ("sequence_classification", {"metric": "perplexity"}, "gate.metric"),
        ("masked_lm", {"metric": "bits_per_byte"}, "gate.metric"),
        ("causal_lm", {"floors": {"loss": 9, "accuracy": 0.5}}, "gate.floors"),
        ("causal_lm", {"metric": "perplexity", "floors": {"bits_per_byte": 9}}, ""),
        ("sequence_classification", {"metric": "macro_f1"}, ""),
        # The scorer is the packaged task's own, so its metrics are known only when it scores.
        ("scored_elsewhere:TASK", {"metric": "perplexity"}, ""),
    ],
)
def test_metric_of_the_gate_that_the_task_lacks_is_an_error(
    tmp_path, monkeypatch, task, gate, field
):
    code = "from dataclasses import replace\nfrom steadytrain.components.tasks.base import late\n"
    code += "from steadytrain.components.tasks.built_in import CAUSAL_LM\n"
    code += "TASK = replace(CAUSAL_LM, scorer=late('any:Scorer'))\n"
    (tmp_path / "scored_elsewhere.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    config = from_mapping(
        {
            "name": "any",
            "data": {"source": ["a"], "task": task},
            "model": {"base": "b"},
            "gate": gate,
        }
    )
    if not field:
        check_task(config)
        return
    with pytest.raises(ConfigError, match="has no such metric of the test side") as caught:
        check_task(config)
    (problem,) = caught.value.problems
    assert problem.field == field
    assert problem.remedy.startswith("one of ")
    assert "loss" in problem.remedy
