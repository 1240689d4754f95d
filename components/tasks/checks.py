"""Settings that the configured task does not read, or cannot work with.

Also the metric that selects the best model: whether it exists, and which direction is better.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from itertools import islice, product
from operator import attrgetter
from typing import Any, Final

from steadytrain.components.shared.config import RunConfig, TrainingConfig
from steadytrain.components.shared.config.data_sections import (
    IMAGES,
    MULTI_LABEL,
    MULTIMODAL,
    SERIES,
    TABLES,
)
from steadytrain.components.shared.config.document import assign, shortened
from steadytrain.components.shared.config.model import FusionConfig
from steadytrain.components.shared.config.space import samples
from steadytrain.components.shared.config.training import BALANCED
from steadytrain.components.shared.errors import ConfigError, Problem
from steadytrain.components.shared.plugins import METRICS, TRAINERS, is_ours
from steadytrain.components.tasks.base import load_task, open_encoder
from steadytrain.components.tasks.encoding.base import has_label_sets
from steadytrain.components.tasks.model_fields import ineffective_fields, refusal, unknown_fields

_FROM_SCRATCH: Final = (
    "causal_lm",
    "supervised_finetuning",
    "masked_lm",
    "denoising",
    "sequence_classification",
    "sequence_regression",
    MULTI_LABEL,
    "multi_task",
    *IMAGES,
    *MULTIMODAL,
)
"""Tasks that need no model to start from; they are not imported to find that out."""
_DECLARED: Final = (*TABLES, *IMAGES, *SERIES, *MULTIMODAL)
"""Tasks that say which fields they read (`Task.reads`)."""
_MODEL: Final = "model.config."
_CORNERS: Final = 1000
"""Combinations of a search's values that are tried for a value that is refused by itself."""


def check_task(config: RunConfig) -> None:
    """Reject settings that the task does not read.

    The task is imported only if there are settings that not every task reads.

    Raises:
        BadInput: the task cannot be imported.
        ConfigError: with every such setting.
    """
    problems = [
        *_framework(config),
        *_device(config),
        *_objectives(config),
        *_feedback(config),
        *_smoothing(config),
        *_best_metric(config),
        *_data(config),
        *_model(config),
        *_evaluation(config),
        *_gate(config),
    ]
    if problems:
        raise ConfigError(problems)


def _objectives(config: RunConfig) -> Iterator[Problem]:
    task, asked = config.data.task, config.training.objectives
    known = load_task(task).objectives if asked else ()
    for name in asked:
        if name not in known:
            yield Problem(
                f"training.{name}",
                repr(getattr(config.training, name).model_dump(exclude_unset=True)),
                f"the loss of data.task {task} does not include it",
                "leave it out, or use a task that does",
            )
    yield from config.training.mixup.task_problems(task, images=task in IMAGES)
    if task not in _FROM_SCRATCH and load_task(task).contrasts:
        yield from config.training.batch_contrastive.task_problems(task)


def _framework(config: RunConfig) -> Iterator[Problem]:
    """Yield a framework of steadytrain that does not train the task."""
    task, framework = config.data.task, config.model.framework
    default = type(config.model).model_fields["framework"].default
    ours = framework == default or not is_ours(TRAINERS, framework)
    if ours and task not in _DECLARED:
        return
    trained = load_task(task)
    known = trained.frameworks or {default}
    # A package's trainer may have a learner of tables.
    if framework not in known and (not trained.tabular or is_ours(TRAINERS, framework)):
        why, remedy = f"it does not train data.task {task}", f"use {' or '.join(sorted(known))}"
        yield Problem("model.framework", framework, why, remedy)
    # PyTorch's loop reads all of `training`, whatever other frameworks read.
    reads = {it for it in trained.reads if framework != default or not _of_training(it)}
    for field, value in _unread(config, frozenset(reads)):
        yield Problem(
            field, shortened(repr(value)), f"data.task {task} does not read it", "leave it out"
        )


def _device(config: RunConfig) -> Iterator[Problem]:
    """Yield a GPU for a table that no learner of steadytrain computes on one."""
    task, framework = config.data.task, config.model.framework
    if config.compute.device != "cuda" or task not in TABLES or not is_ours(TRAINERS, framework):
        return
    if framework in load_task(task).frameworks:
        why = f"model.framework {framework} learns tables on the CPU"
        yield Problem("compute.device", "cuda", why, "leave it out, or set it to cpu")


def _of_training(field: str) -> bool:
    return field.startswith("training.")


def _unread(config: RunConfig, reads: frozenset[str]) -> Iterator[tuple[str, Any]]:
    """Yield the fields with a value of their own that are not among those that are read."""
    for name in sorted({field.rpartition(".")[0] for field in reads}):
        section = attrgetter(name)(config)
        for field, info in type(section).model_fields.items():
            value, path = getattr(section, field), f"{name}.{field}"
            if path not in reads and value != info.get_default(call_default_factory=True):
                yield path, value


def _feedback(config: RunConfig) -> Iterator[Problem]:
    """Yield what feedback without pairs cannot be learned with."""
    task, size = config.data.task, config.training.global_batch_size
    if size < 2 and task not in _FROM_SCRATCH and "kto" in load_task(task).objectives:
        yield Problem(
            "training.global_batch_size",
            repr(size),
            f"data.task {task} compares each answer with those to the batch's other prompts",
            "raise it to at least 2, such as 32",
        )


def _smoothing(config: RunConfig) -> Iterator[Problem]:
    """Yield the smoothing of targets that are not one class."""
    task, smoothing = config.data.task, config.training.label_smoothing_factor
    known = load_task(task) if smoothing else None
    if known and (task == MULTI_LABEL or known.regresses or "kto" in known.objectives):
        yield Problem(
            "training.label_smoothing_factor",
            repr(smoothing),
            f"the loss of data.task {task} has no target to spread",
            "leave it out",
        )


def _best_metric(config: RunConfig) -> Iterator[Problem]:
    """Yield why the metric cannot select the best model, if the task declares its metrics."""
    # The framework of a package has validation metrics of its own.
    if not is_ours(TRAINERS, config.model.framework):
        return
    training = config.training
    if chosen_metric(training) is None and training.greater_is_better is None:
        return
    known = load_task(config.data.task).metrics(config)
    if known and (problem := metric_problem(training, known[0], known)):
        yield problem


def _data(config: RunConfig) -> Iterator[Problem]:
    """Yield what the rows of the task lack."""
    task, training = config.data.task, config.training
    encoder = open_encoder(config.data) if training.order == BALANCED else None
    if encoder and (not encoder.labeled or has_label_sets(encoder)):
        labels = "single class" if encoder.labeled else "labels"
        why = f"data.task {task} has no {labels} to balance"
        yield Problem("training.order", BALANCED, why, "use training.order seeded")
    yield from _tokens(config)
    if training.curriculum.on:
        name = config.data.task
        packed = open_encoder(config.data).packed
        yield from training.curriculum.task_problems(name, load_task(name), packed=packed)
    yield from _shortening(config)


def _shortening(config: RunConfig) -> Iterator[Problem]:
    """Yield why sequences cannot be shortened when memory runs out."""
    least, length = config.recovery.min_sequence_length, config.data.sequence_length
    if least is None:
        return
    field = "recovery.min_sequence_length"
    if not open_encoder(config.data).packed:
        why = f"data.task {config.data.task} has no packed sequences to shorten"
        yield Problem(field, str(least), why, "leave it out")
    elif least >= length:
        why = f"data.sequence_length is {length}, so no sequence could get shorter"
        yield Problem(field, str(least), why, f"set it to {length // 2} or less")


def _tokens(config: RunConfig) -> Iterator[Problem]:
    """Yield settings of a tokenizer that the task does not have."""
    template, added = config.data.chat_template, config.model.added_tokens
    settings = open_encoder(config.data).tokenizer if template or added else None
    if added and settings is None:
        why = f"data.task {config.data.task} has no tokenizer"
        yield Problem("model.added_tokens", repr(added), why, "leave it out")
    if template and not (settings and settings.chat_template):
        why = f"data.task {config.data.task} has no chats"
        yield Problem("data.chat_template", repr(shortened(template)), why, "leave it out")


def _model(config: RunConfig) -> Iterator[Problem]:
    """Yield what the model of the task lacks."""
    task, model = config.data.task, config.model
    trained = load_task(task) if model.dropout.classifier is not None else None
    if trained and (trained.language_model or trained.contrasts):
        yield Problem(
            "model.dropout.classifier",
            repr(model.dropout.classifier),
            f"data.task {task} trains a model without a classifier",
            "leave it out",
        )
    if model.base is None and task not in _FROM_SCRATCH and load_task(task).reference:
        yield Problem(
            "model.base",
            "None",
            f"data.task {task} compares the model with the one that it starts from",
            "name a model that has been trained, best on the preferred answers",
        )
    # For another framework, model.config has fields of its own.
    default = model.has_default_framework
    for field in ineffective_fields(model.config, task, given=True) if default else ():
        name = f"model.config.{field.name}"
        yield Problem(name, repr(field.value), field.why, field.remedy)
    yield from _fusion(config)
    if default and model.config and task in _FROM_SCRATCH:
        wrong = [*unknown_fields(model.config)]
        yield from wrong or _in_studies(config)
    bits = model.adapter.frozen_head
    if bits != "as_loaded" and not load_task(task).language_model:
        yield Problem(
            "model.adapter.frozen_head",
            repr(bits),
            f"it is for a causal language model's own head, and data.task {task} has none",
            "leave it out",
        )


def _fusion(config: RunConfig) -> Iterator[Problem]:
    """Yield an encoder of images that is not read, or that Transformers does not have."""
    task, fusion = config.data.task, config.model.fusion
    # Tasks that declare what they read have refused it already.
    if fusion != FusionConfig() and task not in _DECLARED:
        why, remedy = f"data.task {task} does not read it", "leave it out"
        yield Problem("model.fusion", repr(fusion.model_dump(exclude_unset=True)), why, remedy)
    elif fusion.image and task in MULTIMODAL:
        for result in unknown_fields(fusion.image):
            field = result.field.replace("model.config", "model.fusion.image")
            yield Problem(field, result.value, result.message, result.remedy)


def _studied(config: RunConfig) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Yield what studies give the model: the section, the path in it, and the values."""
    for name, dimension in config.tune.space.items():
        if f"{name}.".startswith(_MODEL):
            for path, value in samples(name, dimension):
                yield "tune.space", f".{name}{path}", {name: value}
    for field, variants in (
        ("ablation.changes", config.ablation.changes),
        ("cross_validation.compare", config.cross_validation.compare),
    ):
        for name, values in variants.items():
            given = {key: it for key, it in values.items() if f"{key}.".startswith(_MODEL)}
            if given:
                yield f"{field}.{name}", "", given


def _in_studies(config: RunConfig) -> Iterator[Problem]:
    """Yield the fields that a study gives the model and it does not have, or refuses.

    A value may depend on others: so it is refused only if no corner of the space has room for it.
    """
    unknown = set[str]()
    for where, path, values in _studied(config):
        fields = [*unknown_fields(_architecture(config, values))]
        for item in fields:
            if f"{where}.{item.field}" not in unknown:
                yield Problem(f"{where}.{item.field}", item.value, item.message, item.remedy)
            unknown.add(f"{where}.{item.field}")
        why = "" if fields else refusal(_architecture(config, values))
        if why and all(refusal(_architecture(config, {**it, **values})) for it in _corners(config)):
            name = values if len(values) > 1 else next(iter(values.values()))
            model = config.model.config["model_type"]
            yield Problem(
                f"{where}{path}",
                repr(name),
                f"a {model} model refuses it: {why}",
                "change it, or the fields that the message names",
            )


def _corners(config: RunConfig) -> Iterator[dict[str, Any]]:
    """Yield the first combinations of the values that a search gives the model."""
    space = config.tune.space.items()
    fields = [(name, it) for name, it in space if f"{name}.".startswith(_MODEL)]
    each = [[(name, value) for _, value in samples(name, it)] for name, it in fields]
    yield from map(dict, islice(product(*each), _CORNERS))


def _architecture(config: RunConfig, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the model with other values."""
    content = {"model": {"config": deepcopy(config.model.config)}}
    for name, value in values.items():
        assign(content, name, value)
    return content["model"]["config"]


def _evaluation(config: RunConfig) -> Iterator[Problem]:
    task, evaluation = config.data.task, config.evaluation
    if evaluation.robustness and not load_task(task).robustness:
        field = evaluation.robustness[0]
        yield Problem(
            f"evaluation.{field}",
            repr(getattr(evaluation, field)),
            f"data.task {task} cannot measure it",
            "leave it out",
        )
    if evaluation.tasks and not load_task(task).language_model:
        yield Problem(
            "evaluation.tasks",
            repr(evaluation.tasks),
            f"lm-eval's tasks are for language models, and data.task is {task}",
            "leave them out",
        )


def _gate(config: RunConfig) -> Iterator[Problem]:
    """Yield the metrics that the gate would not find, if the task declares those it has."""
    task, gate = config.data.task, config.gate
    asked = [("gate.metric", gate.metric), *(("gate.floors", name) for name in gate.floors)]
    ours = [(field, name) for field, name in asked if name and is_ours(METRICS, name)]
    known = load_task(task).test_metrics(config) if ours else None
    for field, name in ours:
        if known is not None and name not in known:
            why = f"data.task {task} has no such metric of the test side"
            yield Problem(field, repr(name), why, f"one of {', '.join(known)}")


_GREATER_IS_BETTER: Final = {
    "loss": False,
    "perplexity": False,
    "accuracy": True,
    "macro_f1": True,
    "micro_f1": True,
    "subset_accuracy": True,
    "preference_accuracy": True,
    "preference_margin": True,
    "recall_at_1": True,
    "mean_reciprocal_rank": True,
    "mse": False,
    "rmse": False,
    "mae": False,
    "r2": True,
    "pearson": True,
}


def chosen_metric(training: TrainingConfig) -> str | None:
    """Return the metric that the configuration chooses; None for the task's own."""
    chosen = training.metric_for_best_model
    return chosen.removeprefix("eval_") if chosen else None


def metric_problem(training: TrainingConfig, own: str, known: Sequence[str]) -> Problem | None:
    """Return why the chosen metric cannot select the best model; None if it can.

    Args:
        own: the metric that the task selects by, whose direction it knows.
        known: the names of all validation metrics.
    """
    metric, given = chosen_metric(training) or own, training.greater_is_better
    if metric != own and metric not in known:
        return _problem(metric, "the task has no such metric", f"one of {', '.join(known)}")
    usual = _GREATER_IS_BETTER.get(metric)
    part, _, of_part = metric.rpartition("_")
    if {f"{part}_loss", f"{part}_accuracy"} <= set(known):
        usual = _GREATER_IS_BETTER.get(of_part)
    if given is not None and usual not in (None, given):
        return Problem(
            "training.greater_is_better",
            str(given).lower(),
            f"a {'higher' if usual else 'lower'} {metric} is better, so that this would keep the "
            "worst model",
            "leave it out",
        )
    if metric != own and greater_is_better(metric, given) is None:
        why = "it is not known whether higher or lower is better"
        return _problem(metric, why, "set training.greater_is_better too")
    return None


def greater_is_better(metric: str, given: bool | None) -> bool | None:
    """Return whether a higher value is better; None if neither the field nor the name says.

    Args:
        given: training.greater_is_better.
    """
    if given is not None:
        return given
    # A part's metric is PART_METRIC.
    return _GREATER_IS_BETTER.get(metric, _GREATER_IS_BETTER.get(metric.rpartition("_")[2]))


def _problem(metric: str, message: str, remedy: str) -> Problem:
    return Problem("training.metric_for_best_model", repr(metric), message, remedy)
