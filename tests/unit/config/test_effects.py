"""What each field affects, and the digests that are made from it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Annotated

import pytest

from steadytrain.components.shared.config import (
    ComputeConfig,
    RunConfig,
    TrainingConfig,
    from_mapping,
)
from steadytrain.components.shared.config.document import assign
from steadytrain.components.shared.config.fields import effect_of, is_section, leaves
from steadytrain.components.shared.config.space import field_problem
from steadytrain.components.shared.effects import Effect, Use, counted
from steadytrain.components.shared.registry import decided_about
from steadytrain.components.train.recovery.adjust import adjustable
from steadytrain.components.train.recovery.takeover import inputs_digest
from steadytrain.components.tune.study import study_digest

MINIMAL = {
    "name": "a",
    "output": "/somewhere",
    "data": {"source": ["x"]},
    "model": {"config": {"model_type": "gpt2"}},
}
LEARNED = Use.RUN | Use.TRAINING | Use.RESUME
PREPARED = Use.RUN | Use.TRAINING | Use.SCORES | Use.GATE


def configured(**values):
    content = from_mapping(MINIMAL).model_dump(mode="json")
    for field, value in values.items():
        assign(content, field, value)
    return from_mapping(content)


def test_every_field_has_an_effect():
    assert all(isinstance(effect_of(field.name), Effect) for field in leaves(RunConfig))
    assert is_section("model.adapter")
    assert not is_section("model.config")
    assert effect_of("model.config.n_layer") is Effect.LEARNED


def test_a_field_without_an_effect_is_an_error():
    class Extended(RunConfig):
        stated: Annotated[TrainingConfig, Effect.LEARNED] = TrainingConfig()
        forgotten: TrainingConfig = TrainingConfig()

    with pytest.raises(TypeError, match="TrainingConfig"):
        counted(Extended(**MINIMAL), Use.RUN)


def test_fields_of_training_say_whether_they_change_what_fits_in_memory():
    """Add a new field here, or mark it with `Use.MEMORY`: runs share what fits by these marks."""
    objectives = TrainingConfig.all_objectives()
    fields = {**TrainingConfig.model_fields, **ComputeConfig.model_fields}
    unmarked = [name for name, field in fields.items() if Use.MEMORY not in field.metadata]
    assert [name for name in unmarked if name not in objectives] == [
        *("global_batch_size", "micro_batch_size", "num_train_epochs", "max_steps"),
        *("learning_rate", "lr_scaling", "base_global_batch_size", "lr_scheduler_type"),
        *("lr_scheduler_kwargs", "warmup_steps", "weight_decay", "layer_decay"),
        *("label_smoothing_factor", "label_thresholds", "mixture", "max_grad_norm"),
        *("optim_args", "adam_beta1", "adam_beta2", "adam_epsilon", "goal", "prefetch_batches"),
        *("loader_workers", "seed", "order", "order_options", "curriculum"),
        # They count as `weight_copies`.
        *("components", "averaging"),
        *("gradient_compression", "monitor", "profile", "full_determinism", "logging_steps"),
        *("eval_steps", "save_steps", "save_strategy", "save_total_limit", "save_keep_every"),
        *("metric_for_best_model", "greater_is_better", "load_best_model_at_end"),
        *("early_stopping_patience", "early_stopping_threshold"),
        *("launcher", "device", "nodes", "nproc_per_node", "threads_per_rank", "offload_path"),
        *("nccl", "pods", "price_per_hour", "budget_usd"),
    ]


def test_adjustable_fields_neither_choose_rows_nor_order_them():
    """The list is in the recovery guide; a new field must be read at every step."""
    assert adjustable() == [
        f"training.{name}"
        for name in (
            *("learning_rate", "weight_decay", "max_grad_norm", "logging_steps", "eval_steps"),
            *("save_steps", "early_stopping_patience", "early_stopping_threshold"),
        )
    ]
    guide = (Path(__file__).parents[3] / "docs/guides/recovery.md").read_text()
    section = guide.partition("## Change a setting under way")[2].partition("\n## ")[0]
    assert not [name for name in adjustable() if f"`{name.partition('.')[2]}`" not in section]


@pytest.mark.parametrize(
    ("field", "value", "uses"),
    [
        ("output", "/elsewhere", Use(0)),
        ("name", "b", Use.RUN),
        ("data.source", ["y"], PREPARED),
        ("data.split_salt", "other", PREPARED | Use.DATA),
        ("data.validation_source", ["v"], PREPARED),
        ("data.sequence_length", 64, PREPARED | Use.DATA),
        ("model.added_tokens", ["<a>"], LEARNED | Use.DATA),
        ("model.dropout.attention", 0.3, LEARNED),
        ("model.vocab_size", 9000, LEARNED),
        ("training.learning_rate", 1e-4, LEARNED),
        ("training.seed", 7, LEARNED | Use.SCORES | Use.GATE),
        ("training.averaging.kind", "ema", LEARNED),
        ("training.distillation.teacher", "t", LEARNED | Use.MEMORY),
        ("training.eval_steps", 7, Use.RUN | Use.TRAINING),
        ("training.micro_batch_size", 2, Use.RUN | Use.TRAINING),
        ("training.monitor.layers", True, Use(0)),
        ("compute.threads_per_rank", 2, Use.RUN | Use.TRAINING),
        ("compute.prefer", "native", Use.RUN | Use.TRAINING | Use.MEMORY),
        ("compute.nccl", {"NCCL_DEBUG": "INFO"}, Use(0)),
        ("compute.pods.memory", "7Gi", Use(0)),
        ("compute.price_per_hour", 2.0, Use(0)),
        ("compute.budget_usd", 2.0, Use(0)),
        ("training.goal", "best", Use(0)),
        ("recovery.jitter", False, Use.RUN),
        ("recovery.spike_threshold", 0.0, Use.RUN | Use.TRAINING),
        ("recovery.server_wait_seconds", 1.0, Use(0)),
        ("evaluation.max_examples", 9, Use.RUN | Use.SCORES | Use.GATE),
        ("evaluation.landscape.points", 15, Use.RUN | Use.SCORES | Use.GATE),
        ("gate.margin", 0.2, Use.RUN | Use.GATE),
        ("gate.compared", 4, Use.GATE),
        ("gate.promised", 0.5, Use.GATE),
        ("tracking.uri", "sqlite:///x", Use.RUN | Use.GATE),
        ("registry.model_name", "m", Use.RUN),
        ("observability.diagnosis", False, Use(0)),
        ("tune.seed", 7, Use.STUDY),
        ("tune.budget.trials", 7, Use(0)),
        ("ablation.confidence", 0.9, Use(0)),
        ("cross_validation.folds", 7, Use.STUDY),
        ("cross_validation.confidence", 0.9, Use(0)),
    ],
)
def test_a_change_counts_for_what_the_field_affects(field, value, uses):
    before, after = configured(), configured(**{field: value})
    assert {use for use in Use if before.counted(use) != after.counted(use)} == set(uses)
    assert (before.digest() != after.digest()) == (Use.RUN in uses)


def test_objectives_whose_scores_depend_on_them_count_for_the_scores():
    masked = {"data.task": "masked_lm", "model.config": {"model_type": "bert"}}
    before = configured(**masked)
    after = configured(**masked, **{"training.masking.probability": 0.3})
    found = {use for use in Use if before.counted(use) != after.counted(use)}
    assert found == set(LEARNED | Use.SCORES)


def test_all_folds_share_their_prepared_data():
    first, second = (configured(**{"cross_validation.fold": fold}) for fold in (0, 1))
    assert first.counted(Use.DATA) == second.counted(Use.DATA) != configured().counted(Use.DATA)
    assert first.digest() != second.digest()


def test_prepared_data_do_not_depend_on_a_curriculum_without_a_column():
    plain = configured(**{"data.task": "sequence_classification"})
    ordered = configured(
        **{"data.task": "sequence_classification", "training.curriculum.by": "length"}
    )
    assert ordered.counted(Use.DATA) == plain.counted(Use.DATA)


# As the version wrote them before fields stated their effects. A new field with `IfSet` leaves them
# as they are, so that runs, studies and decisions of earlier versions continue.
@pytest.mark.parametrize(
    ("change", "digests"),
    [
        ({}, ["d5d242547b0b", "94e285157466", "0a73cc1d372f", "e3970323ecab"]),
        (
            {"training.averaging.kind": "ema"},
            ["e1fa457194ec", "96ebef6f64d7", "0a73cc1d372f", "efc86d7bab20"],
        ),
        (
            {"cross_validation.fold": 2},
            ["d72bf8653104", "94e285157466", "0a73cc1d372f", "c43ba265b5cf"],
        ),
    ],
)
def test_digests_of_runs_decisions_and_studies_are_those_of_earlier_versions(change, digests):
    config, data = configured(**change), SimpleNamespace(fingerprint="f" * 64)
    found = (
        config.digest(),
        inputs_digest(config, data),
        decided_about(config, "w").rules,
        study_digest(config),
    )
    assert [digest[:12] for digest in found] == digests


def test_a_copy_with_other_values_has_its_own_digest():
    config = configured()
    config.digest()
    renamed = config.model_copy(update={"name": "b"})
    assert renamed.digest() != config.digest()
    assert renamed.run_id.startswith("b-")


@pytest.mark.parametrize(
    "field",
    [
        *("model.adapter.frozen_embeddings", "model.export_dtype", "training.label_thresholds"),
        *("observability.diagnosis", "training.monitor.layers", "model.adapter.merge"),
    ],
)
def test_a_field_that_does_not_change_what_a_trial_learns_is_not_tuned(field):
    _, message, _ = field_problem(configured(), field)
    assert "does not change what a trial learns" in message


@pytest.mark.parametrize("field", ["model.base", "model.revision", "model.config.n_layer"])
def test_what_a_trial_learns_from_can_be_tuned(field):
    assert field_problem(configured(), field) is None
